"""Groups whose rollouts all got the same reward: there is nothing to compare, so nothing to learn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agentrig.figures import figure, mean
from agentrig.text import amount
from agentrig.view import figures
from agentrig.view.causes.evidence import Evidence, StepFacts, total
from agentrig.view.causes.finding import Finding, problem
from agentrig.view.causes.trend import LIKELY, at_least, at_most, difference, gained, quarter, rewards_of

ZERO_VARIANCE_LIMIT = 0.8
"""If a larger share of groups has zero variance in the reward, there is little to learn from."""

ENTROPY_LEFT = 0.3
"""An entropy below this share of the first steps' has collapsed."""


def zero_variance(evidence: Evidence) -> Iterator[Finding]:
    """The share of groups with a single reward, and why they have it."""
    yield from _of_the_last_steps(evidence)
    steps, width = evidence.steps, quarter(evidence.steps)
    groups, same = total(steps, "groups"), total(steps, "same")
    late = steps[-width:]
    if not groups or total(late, "same") <= ZERO_VARIANCE_LIMIT * total(late, "groups"):
        return
    if (found := _collapsed(evidence)) is not None:
        yield found
    elif at_least(same, groups) > ZERO_VARIANCE_LIMIT and not gained(evidence):
        yield constant(evidence, groups, same)


def _of_the_last_steps(evidence: Evidence) -> Iterator[Finding]:
    shown, values = figures.series(evidence.run, "zero_variance_groups")
    alone = min(values, default=0) == 1 and not evidence.total("groups")  # of one rollout each: nothing compares them
    if values and not alone:
        last = mean(values[-figures.SMOOTHING :]) or 0.0
        n = min(len(values), figures.SMOOTHING)
        steps = "step" if n == 1 else f"{n} steps"
        text = f"in {last:.0%} of the groups of the last {steps} all rollouts got the same reward"
        much = last > ZERO_VARIANCE_LIMIT
        left = _left(evidence, shown[-n:]) if much else f"training learns from the other {1 - last:.0%}"
        yield Finding("warn" if much else "fact", f"{text}: {left}")


def _left(evidence: Evidence, latest: Sequence[int]) -> str:
    """Say what the groups with a single reward of the latest steps left to learn from: nothing, if all are wrong."""
    late = [facts for facts in evidence.steps if facts.step in latest]
    right, wrong = total(late, "same_right"), total(late, "same_wrong")
    if not wrong:
        return "little was left to learn from"
    if wrong == total(late, "groups"):
        left = "every answer was wrong, so nothing could be learned"
    else:
        left = f"in {wrong} of these groups every answer was wrong, in {right} every answer was right"
    never = len(_never_right(evidence.steps, late))
    were = "task was" if never == 1 else "tasks were"
    return f"{left}; {never} {were} never right: too hard for this model" if never else left


def _never_right(steps: Sequence[StepFacts], late: Sequence[StepFacts]) -> set[str]:
    """Return the tasks that are all wrong in the steps `late`, and were so before most groups had a single reward."""
    since = alike_since(steps)
    before = [facts for facts in steps if facts.step < (late[0].step if since is None else since)]
    always = {task for facts in before for task in facts.stuck}
    return always & {task for facts in late for task in facts.stuck} - {task for facts in steps for task in facts.alive}


def constant(evidence: Evidence, groups: int, same: int) -> Finding:
    """Say why most groups of the whole run have a single reward."""
    right, wrong, answers = (evidence.total(key) for key in ("same_right", "same_wrong", "same_answer"))
    text = f"in {same} of {amount(groups, 'group')} (one task's rollouts in a step) all rewards were the same"
    size = evidence.setting("algorithm.group_size", "algorithm.verl.actor_rollout_ref.rollout.n")
    cause, settings, advice = "zero-variance-groups", (*size, "tasks.use"), ""
    rewards = set(rewards_of(evidence.steps))
    if len(rewards) == 1 and 0.0 not in rewards and not right and answers <= 0.9 * same:
        cause, settings = "constant-reward", ("reward.use",)
        text += f", {figure(rewards.pop())} in all of them, for different answers"
        advice = "Does the reward depend on the answer?"
    elif right > 0.9 * same:
        cause, settings = "tasks-too-easy", ("tasks.use", *size)
        text += f", and in {right} of these every answer was correct"
        advice = "Use harder tasks: these teach nothing. Or does the reward ignore the answer?"
    elif wrong > 0.9 * same:
        cause, settings = "tasks-too-hard", ("tasks.use", "algorithm.model", *size, "algorithm.temperature")
        text += f", and in {wrong} of these no answer was correct; in {answers} all rollouts gave the same answer"
        advice = (
            "Use a model that is sometimes right: agentrig warmup makes one from a few right answers "
            "(docs/how-to/laptop.md). Or use easier tasks, or more rollouts a task."
        )
    elif answers > 0.9 * same:
        cause, settings = "no-exploration", ("algorithm.temperature", *size)
        text += f", and in {answers} all rollouts gave one and the same answer"
        advice = (
            "Sample with a higher temperature, so that the rollouts of a task differ. Or does the agent ignore "
            "endpoint.sampling, or set a seed?"
        )
    else:
        advice = "Use more rollouts a task, tasks that the model gets right sometimes, or a reward with finer values."
    return problem(
        cause,
        text,
        seen=(same, groups, "groups"),
        since=evidence.since("same"),
        settings=settings,
        advice=advice,
        explains=(
            *("learning-rate-too-small", "weights-unchanged"),
            *("constant-reward", "zero-variance-groups", "low-entropy"),
        ),
    )


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
    since = alike_since(steps)
    # tasks that were never right before do not show that the policy lost something
    never = _never_right(steps, late)
    wrong = total(late, "same") - total(late, "same_right") - sum(facts.stuck.count(t) for facts in late for t in never)
    solved = at_least(wrong, total(late, "groups")) < 0.05
    if solved or difference(rewards_of(before), rewards_of(late)) > LIKELY:
        return None
    _, entropy = figures.series(evidence.run, "algorithm", "entropy")
    if entropy:
        first, last = mean(entropy[:width]) or 0.0, mean(entropy[-width:]) or 0.0
        words = f"the entropy fell from {figure(first)} to {figure(last)} nats a token"
        collapsed = last < ENTROPY_LEFT * first
    else:
        words = f"in {total(late, 'same_answer')} of the last {total(late, 'groups')} groups all answers are the same"
        collapsed = at_least(total(late, "same_answer"), total(late, "groups")) > ZERO_VARIANCE_LIMIT
    if not collapsed:
        return None
    other = " to tasks that were not always wrong" if never else ""
    begun = f"; since step {since}, most groups are like that" if since is not None else ""
    return problem(
        "entropy-collapse",
        f"the policy stopped exploring before the tasks were solved: {words}; in {total(late, 'same')} of "
        f"{total(late, 'groups')} groups (one task's rollouts in a step) of the last {amount(width, 'step')} all "
        f"rewards were the same, in {wrong} of these with wrong answers{other}{begun}",
        seen=(total(late, "same"), total(late, "groups"), "groups"),
        since=since,
        settings=(
            *evidence.setting("algorithm.lr", "algorithm.verl.actor_rollout_ref.actor.optim.lr"),
            "algorithm.temperature",
            "algorithm.clip_high",
            "algorithm.kl_loss_coef",
        ),
        advice="Lower the learning rate; a higher temperature or clip_high, or a KL loss, keeps answers different.",
        explains=("zero-variance-groups", "learning-rate-too-small", "weights-unchanged"),
    )


def alike_since(steps: Sequence[StepFacts]) -> int | None:
    """Return the first step from which on most groups had a single reward."""
    since = None
    for facts in reversed(steps):
        if facts.groups and facts.same <= ZERO_VARIANCE_LIMIT * facts.groups:
            break
        since = facts.step
    return since
