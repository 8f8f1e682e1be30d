"""Groups whose rollouts all got the same reward: there is nothing to compare, so nothing to learn."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from agentrig.figures import count, figure, mean, number
from agentrig.plan import script_of
from agentrig.run.guards import ONE_FORM
from agentrig.text import amount
from agentrig.view import figures
from agentrig.view.causes.evidence import Evidence, StepFacts, total
from agentrig.view.causes.finding import Finding, problem
from agentrig.view.causes.trend import (
    LIKELY,
    at_least,
    at_most,
    change,
    gained,
    lasting,
    more_right,
    named,
    quarter,
    rewards_of,
    so_many,
)
from agentrig.view.reading import dig

ZERO_VARIANCE_LIMIT = 0.8
"""If a larger share of groups has zero variance in the reward, there is little to learn from."""

ENTROPY_LEFT = 0.3
"""An entropy below this share of the first steps' has collapsed …"""

MEASURED_BEFORE = 0.6
"""… or below this share, if most of the last steps trained nothing: the last entropies are of steps before them."""

SELDOM = 0.05
"""No answer was right, and surely less than this share could have been."""

IN_FORM = "; an answer differs from the right one only in form (see below)"
"""What is said besides if the run has seen that (`Evidence.form_only`) …"""

OF_FORM = ("reward.use", "agent.use", "tasks.use", "algorithm.model")
"""… and the settings."""

CONSTANT_EXPLAINS = (
    *("learning-rate-too-small", "weights-unchanged"),
    *("constant-reward", "zero-variance-groups", "low-entropy"),
)
"""What follows from groups with a single reward …"""

TOO_HARD_EXPLAINS = (*CONSTANT_EXPLAINS, "entropy-collapse", "no-exploration")
"""… and from answers that are all wrong."""


def zero_variance(evidence: Evidence) -> Iterator[Finding]:
    """The share of groups with a single reward, and why they have it."""
    yield from fading(evidence)
    if none_right(evidence):
        yield too_hard(evidence)
        return
    steps, late = evidence.steps, evidence.steps[-quarter(evidence.steps) :]
    groups, same = total(steps, "groups"), total(steps, "same")
    much = groups and total(late, "same") > ZERO_VARIANCE_LIMIT * total(late, "groups")
    # a credit that gives calls advantages of their own may learn from groups with a single reward
    _, untaught = figures.series(evidence.run, "untaught_groups")
    least = min((mean(some) or 0.0 for some in (untaught, untaught[-quarter(untaught) :]) if some), default=1.0)
    much = much and least > ZERO_VARIANCE_LIMIT
    if much and (found := _collapsed(evidence)) is not None:
        yield found
    elif evidence.silent:
        yield constant(evidence, evidence.silent)
    elif much and at_least(same, groups) > ZERO_VARIANCE_LIMIT and not gained(evidence):
        yield constant(evidence, steps)


def none_right(evidence: Evidence) -> bool:
    """Whether so many training answers, and all of them, were wrong that this is no chance."""
    surely = at_most(0, evidence.total("scored")) < SELDOM
    return surely and evidence.none_right and not evidence.silent and not more_right(evidence)


def too_hard(evidence: Evidence) -> Finding:
    """Say that no training answer was right, whatever reward was paid for a part."""
    n = evidence.total("scored")
    in_form = IN_FORM if evidence.form_only else ""
    parts = "; rewards were paid for parts only" if any(facts.reward for facts in evidence.steps) else ""
    return problem(
        "tasks-too-hard",
        f"none of {count(n)} training answers was right{parts}{in_form}",
        seen=(n, n, "rollouts"),
        since=evidence.since("scored"),
        settings=OF_FORM if in_form else ("tasks.use", "reward.use", "algorithm.model", "algorithm.temperature"),
        advice=_easier(evidence),
        explains=TOO_HARD_EXPLAINS,
    )


def fading(evidence: Evidence) -> Iterator[Finding]:
    """The share of groups with a single reward, and the entropy, at the end and at first.

    Those that say that little is left to learn, so that more steps would hardly help, are warnings.
    """
    _, alike = figures.series(evidence.run, "zero_variance_groups")
    shown, values = _untaught(evidence)
    alone = min(alike, default=0) == 1 and not evidence.total("groups")  # of one rollout each: nothing compares them
    n = quarter(values)
    first, last = mean(values[:n]) or 0.0, mean(values[-n:]) or 0.0
    if values and not alone:
        begun = f" ({first:.0%} in the first {so_many(n)})" if len(values) > n else ""
        text = f"in {last:.0%} of the groups of the last {so_many(n)} all rollouts got the same reward{begun}"
        if (same := mean(alike[-n:])) is not None and (same != last or mean(alike[:n]) != first):
            text = (
                f"{last:.0%} of the groups of the last {so_many(n)} taught nothing{begun}; in {same:.0%} all rollouts "
                "got the same reward"
            )
        much = last > ZERO_VARIANCE_LIMIT
        other = "" if text.startswith(f"{last:.0%}") else "the other "
        left = _left(evidence, shown[-n:], last) if much else f"training learns from {other}{1 - last:.0%}"
        yield Finding("warn" if much else "fact", f"{text}: {left}")
    if fall := entropy_fall(evidence):
        yield Finding("warn", f"{fall}: the answers of a task become alike")


def entropy_fall(evidence: Evidence, left: float = ENTROPY_LEFT) -> str:
    """Say how far the entropy fell, if less than this share of it is left; else ''."""
    steps, values = entropies(evidence)
    n = quarter(values)
    first, last = mean(values[:n]) or 0.0, mean(values[-n:]) or 0.0
    if len(values) < 4 or last >= left * first:
        return ""
    return (
        f"the entropy fell from {figure(first)} nats a token (mean of {named(steps[:n])}) to {figure(last)} "
        f"({named(steps[-n:])})"
    )


def entropies(evidence: Evidence) -> tuple[Sequence[int], Sequence[float]]:
    """Return the entropy of each step that trained something; of others some runs have one, which tells nothing."""
    idle = set(figures.without_update(evidence.run))
    measured = list(zip(*figures.series(evidence.run, "algorithm", "entropy"), strict=True))
    return [s for s, _ in measured if s not in idle], [value for s, value in measured if s not in idle]


def unsolved(evidence: Evidence) -> Iterator[Finding]:
    """The training tasks that no rollout of any step was right on, if groups with a single reward left little to learn.

    Where an update destroyed the policy, they say nothing of the tasks: `agentrig.view.diagnosis` leaves this out.
    """
    shown, values = _untaught(evidence)
    last = mean(values[-quarter(values) :]) or 0.0
    never = evidence.never_right
    if shown and last > ZERO_VARIANCE_LIMIT and never and not evidence.none_right:
        tried = [task for facts in evidence.steps for task in facts.tried]
        were = "was" if len(never) == 1 else "were"
        text = f"{count(len(never))} of {amount(len(set(tried)), 'training task')} {were} right in no rollout"
        yield Finding("warn", f"{text}; each was tried in one step only" if len(tried) == len(set(tried)) else text)


def classes(evidence: Evidence) -> Iterator[Finding]:
    """The classes of tasks that were right in no training rollout, though others were."""
    if found := evidence.classes_never_right:
        yield Finding("warn", f"In training, {found}")


def _untaught(evidence: Evidence) -> tuple[Sequence[int], Sequence[float]]:
    """Return of each step the share of groups that taught nothing; of an old run, of those with a single reward."""
    found = figures.series(evidence.run, "untaught_groups")
    return found if found[0] else figures.series(evidence.run, "zero_variance_groups")


def _left(evidence: Evidence, latest: Sequence[int], untaught: float) -> str:
    """Say what the groups with a single reward of the latest steps left to learn from: nothing, if all are wrong."""
    late = [facts for facts in evidence.steps if facts.step in latest]
    right, wrong = total(late, "same_right"), total(late, "same_wrong")
    if not wrong:
        return "little was left to learn from"
    if wrong == total(late, "groups"):
        return f"every answer was wrong{', so nothing could be learned' if untaught == 1 else ''}"
    return f"in {wrong} of these groups every answer was wrong, in {right} every answer was right"


def _never_alive(steps: Sequence[StepFacts], late: Sequence[StepFacts]) -> set[str]:
    """Return the tasks that taught nothing: all wrong in `late`, and so before most groups had a single reward."""
    alike = lasting(steps, mostly_alike) or late
    before = [facts for facts in steps if facts.step < alike[0].step]
    always = {task for facts in before for task in facts.stuck}
    return always & {task for facts in late for task in facts.stuck} - {task for facts in steps for task in facts.alive}


def constant(evidence: Evidence, steps: Sequence[StepFacts]) -> Finding:
    """Say why most groups of some steps have a single reward."""
    groups, same, right, wrong, answers = (
        total(steps, key) for key in ("groups", "same", "same_right", "same_wrong", "same_answer")
    )
    unknown = 0 < groups == total(steps, "judged_only")
    what, unit = f"{amount(groups, 'group')} (one task's rollouts in a step)", "groups"
    if not groups:  # of one rollout each
        groups = same = total(steps, "scored")
        right, wrong = total(steps, "right"), same - total(steps, "right")
        what, unit = amount(groups, "rollout"), "rollouts"
    of_steps = "" if len(steps) == len(evidence.steps) else f" of {named([facts.step for facts in steps])}"
    text = f"in {same} of {what}{of_steps} all rewards were the same"
    size = evidence.setting("algorithm.group_size", "algorithm.verl.actor_rollout_ref.rollout.n")
    cause, settings, advice = "zero-variance-groups", (*size, "tasks.use"), ""
    rewards = set(rewards_of(steps))
    if len(rewards) == 1 and 0.0 not in rewards and not right and answers <= 0.9 * same:
        cause, settings = "constant-reward", ("reward.use",)
        text += f", {figure(rewards.pop())} in all of them{'' if unknown else ', for different answers'}"
        advice = "Does the reward depend on the answer?"
    elif right > 0.9 * same:
        cause, settings = "tasks-too-easy", ("tasks.use", *size)
        text += f", and in {right} of these every answer was correct"
        advice = "Use harder tasks: these teach nothing. Or does the reward ignore the answer?"
    elif wrong > 0.9 * same:
        cause = "tasks-too-hard"
        settings = ("tasks.use", "reward.use", "algorithm.model", *size, "algorithm.temperature")
        text += f", and in {wrong} of these no answer was correct"
        text += "" if unknown else f"; in {answers} all rollouts gave the same answer"
        if evidence.none_right:
            text = f"none of {count(evidence.total('scored'))} training answers was right; {text}"
        if evidence.form_only:
            settings, text = OF_FORM, f"{text}{IN_FORM}"
        advice = _easier(evidence)
    elif answers > 0.9 * same:
        cause, settings = "no-exploration", ("algorithm.temperature", *size)
        text += f", and in {answers} all rollouts gave one and the same answer"
        advice = (
            "Sample with a higher temperature, so that the rollouts of a task differ. Or does the agent ignore "
            "endpoint.sampling, or set a seed?"
        )
    else:
        advice = f"{evidence.classes_never_right}\n".lstrip()
        advice += "Use more rollouts a task, tasks that the model gets right sometimes, or a reward with finer values."
    return problem(
        cause,
        text,
        seen=(same, groups, unit),
        since=next((facts.step for facts in steps if facts.same), steps[0].step),
        settings=settings,
        advice=advice,
        explains=CONSTANT_EXPLAINS,
    )


def better_start(evidence: Evidence, late: Sequence[StepFacts]) -> str:
    """Return what to do where most tasks that are still wrong were never right: no setting of training helps these.

    A task that was tried in the late steps only says nothing of the start: the policy had changed by then.
    """
    stuck = {task for facts in late for task in facts.stuck}
    before = {task for facts in evidence.steps if facts.step < late[0].step for task in facts.tried} if late else set()
    never = stuck & before & evidence.never_right
    if 2 * len(never) <= len(stuck):
        return ""
    return (
        f"{len(never)} of the {amount(len(stuck), 'task')} whose answers are all wrong at the end were never right in "
        "training: start from a model that is right on such tasks sometimes (a longer warm-up, with a higher --until "
        f"or without it, and with more labels), or use easier tasks.{_warm_up(evidence)}"
    )


def _easier(evidence: Evidence) -> str:
    """Return what to do where the model is right too seldom to learn from its rewards."""
    directory = evidence.run.directory
    config = shlex.quote(str(directory / "config.toml"))
    forecast = "" if script_of(directory) else f" Try a model before: agentrig forecast {config} algorithm.model=DIR"
    form = f"{evidence.form_only}\n{ONE_FORM}\n" if evidence.form_only else ""
    doubt = " Or does the reward take right answers for wrong?" if evidence.none_right else ""
    return (
        f"{form}Use a model that is sometimes right, easier tasks, or more rollouts a task.{doubt} The shipped model "
        f"mini knows only the SQL prompts of its recipe.{forecast}{_warm_up(evidence)}"
    )


def _warm_up(evidence: Evidence) -> str:
    """Return the command that makes a starting model for the run's tasks; '' for those of a script, which it lacks."""
    run = evidence.run
    labels = most_labels(evidence, 200)
    if script_of(run.directory) or not labels:
        return ""
    named = Path("models") / str(run.manifest.get("recipe") or run.name)
    if (named / "config.json").is_file() and evidence.value("algorithm.model") != str(named):
        return f"\n{named} is a model, and this run did not start from it. Is algorithm.model={named} missing?"
    out = free_name(named)
    return f"\nMake one from right answers (docs/how-to/laptop.md): {warm_up_command(evidence, labels, out)}"


def train_again(evidence: Evidence, *settings: str) -> str:
    """Return the command that starts a run anew with other settings; '' for the run of a script."""
    directory = evidence.run.directory
    if script_of(directory):
        return ""
    name = str(evidence.value("run.name") or "")
    renamed = [f"run.name={free_name(directory.with_name(name)).name}"] if name else []
    return shlex.join(["agentrig", "train", str(directory / "config.toml"), *settings, *renamed])


def warm_up_command(evidence: Evidence, labels: int, out: Path, *options: str) -> str:
    """Return the command that makes a starting model with so many labels, in a folder of its own."""
    config = evidence.run.directory / "config.toml"
    return shlex.join(["agentrig", "warmup", str(config), "--labels", str(labels), *options, "--out", str(out)])


def most_labels(evidence: Evidence, wanted: int) -> int:
    """Return so many labels, but at most three quarters of the training tasks: the model is tried on the others."""
    n = int(number(dig(evidence.run.manifest, "data", "train", "tasks")) or 0)
    return min(wanted, max(1, 3 * n // 4)) if n else 0


def free_name(path: Path) -> Path:
    """Return a path, or with the first number from 2 on behind it, that does not exist yet."""
    names = (path, *(path.with_name(f"{path.name}-{i}") for i in range(2, 1000)))
    return next(name for name in names if not name.exists())


def _collapsed(evidence: Evidence) -> Finding | None:
    """Find a policy that stopped exploring before the tasks were solved."""
    steps, width = evidence.steps, quarter(evidence.steps)
    if len(steps) < 4:
        return None
    early, late, before = steps[:width], steps[-width:], steps[-2 * width : -width]
    if at_least(total(late, "same"), total(late, "groups")) <= ZERO_VARIANCE_LIMIT:
        return None
    if at_most(total(early, "same"), total(early, "groups")) >= ZERO_VARIANCE_LIMIT:
        return None
    # tasks that were never right before do not show that the policy lost something
    never = _never_alive(steps, late)
    wrong = total(late, "same") - total(late, "same_right") - sum(facts.stuck.count(t) for facts in late for t in never)
    solved = at_least(wrong, total(late, "groups")) < 0.05
    if solved or change(before, late).errors > LIKELY:
        return None
    idle = 2 * len({facts.step for facts in late} & set(entropies(evidence)[0])) <= len(late)
    words = entropy_fall(evidence, MEASURED_BEFORE if idle else ENTROPY_LEFT)
    if idle and not words:
        answers = total(late, "same_answer")
        words = f"in {answers} of the last {total(late, 'groups')} groups all answers are the same"
        words *= at_least(answers, total(late, "groups")) > ZERO_VARIANCE_LIMIT
    if not words:
        return None
    other = " to tasks that were not always wrong" if never else ""
    since = lasting(steps, mostly_alike)[0].step
    return problem(
        "entropy-collapse",
        f"the policy stopped exploring before the tasks were solved: {words}; in {total(late, 'same')} of "
        f"{total(late, 'groups')} groups (one task's rollouts in a step) of the last {so_many(width)} all rewards were "
        f"the same, in {wrong} of these with wrong answers{other}; most groups of most steps are like that since step "
        f"{since}",
        seen=(total(late, "same"), total(late, "groups"), "groups"),
        since=since,
        settings=(
            *evidence.setting("algorithm.lr", "algorithm.verl.actor_rollout_ref.actor.optim.lr"),
            "algorithm.temperature",
            "algorithm.clip_high",
            "algorithm.kl_loss_coef",
        ),
        advice=f"{evidence.classes_never_right}\nLower the learning rate; a higher temperature or clip_high, or a KL "
        f"loss, keeps answers different.\n{better_start(evidence, late)}".strip(),
        explains=("zero-variance-groups", "learning-rate-too-small", "weights-unchanged"),
    )


def mostly_alike(facts: StepFacts) -> bool:
    """Whether most groups of a step had a single reward."""
    return 2 * facts.same > facts.groups
