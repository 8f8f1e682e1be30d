"""A policy that hardly moved, moved too far, or learned from old rollouts: learning rate, clip, KL, staleness."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agentrig.figures import count, figure, mean, number
from agentrig.ledger import WORTHLESS
from agentrig.run.verdict import EASY
from agentrig.text import amount
from agentrig.view import figures
from agentrig.view.causes.evidence import Evidence, StepFacts, total
from agentrig.view.causes.finding import Finding, problem
from agentrig.view.causes.groups import ZERO_VARIANCE_LIMIT, constant, entropies, train_again, zero_variance
from agentrig.view.causes.trend import (
    LIKELY,
    SURE,
    at_least,
    at_most,
    change,
    fewer_right,
    gained,
    lasting,
    named,
    quarter,
    reward_trend,
    rewards_of,
    so_many,
)
from agentrig.view.causes.weights import LR

MOVED = 0.05
"""If surely no more greedy answers than this share differ after training, the policy has not moved."""

NONE_MOVED = 30
"""Nor has it if not one of so many differs."""

FEW_STEPS = 5
"""After fewer steps, nothing is said about a policy that has not moved."""

FALLEN = 0.7
"""A mean reward below this share of an earlier one has fallen."""

AT_ONCE = 2
"""A policy that teaches nothing more so many steps after its best ones, or fewer, was destroyed by an update."""

NOTHING_LEFT = 0.05
"""If less than this share of the reward is left after such an update, a tenth of the learning rate is still too much.
"""

LOW_ENTROPY = 0.1
"""Nats a token below which a policy hardly explores: at each token, the likeliest has a probability of about 0.98."""

LEFT_OUT = 0.1
"""If the credit leaves out more of the calls, the entropy of the trained ones says nothing of all."""

ALIKE = 1 / 3
"""Up to this share of groups without variance, a low entropy is no fault."""

CLIPPED = 0.3
"""If more of the trained tokens are clipped, most of an update is lost."""

TRUNCATED = 0.1
"""If more of the stale tokens have a truncated importance weight, the rollouts are too old."""

REACHED = 0.99
"""A learning rate that was warmed up has reached the stated one from this part of it on: schedulers lower it again."""


def _same_answers(evidence: Evidence) -> bool:
    """Whether surely almost all greedy answers are the same before and after training, or all of `NONE_MOVED`."""
    _, _, other, n = evidence.changed
    return at_most(other, n) <= MOVED or (n >= NONE_MOVED and not other)


def barely_moved(evidence: Evidence) -> Iterator[Finding]:
    """Greedy answers that are the same before and after training."""
    _, _, other, n = evidence.changed
    run = evidence.run
    trained = [s for s, v in zip(*figures.series(run, "algorithm", "weight_change"), strict=True) if v > 0]
    if len(trained) < FEW_STEPS or not _same_answers(evidence) or gained(evidence) or fewer_right(evidence):
        return
    lr, warmup = _highest(evidence, "algorithm.lr"), number(evidence.value("algorithm.warmup_steps")) or 0
    _, used = figures.series(run, "algorithm", "lr")
    text = f"{count(n - other)} of {count(n)} answers are the same before and after training ({evidence.where})"
    settings = evidence.setting(*LR)
    if lr and used and warmup and max(used) < REACHED * lr:
        settings = ("algorithm.warmup_steps", *settings)
        text += f"; the learning rate was still rising (warmup_steps), at {max(used):.3g} of {lr:.3g}"
        cause, advice = "warmup-too-long", "Fewer warmup_steps, or more steps."
    else:
        cause, advice = "learning-rate-too-small", "Raise the learning rate by a factor of 10 and compare."
        text += f"; the learning rate is {lr:.3g}" if lr else ""
    yield problem(
        cause,
        f"the policy hardly moved: {text}",
        seen=(n - other, n, "answers"),
        since=trained[0],
        settings=settings,
        advice=advice,
    )


def unexploring(evidence: Evidence) -> Iterator[Finding]:
    """A policy whose answers were nearly certain from the first steps on, in a run that did not get better.

    The entropy is that of the trained calls. Where the credit left out others, it does not tell how alike all were.
    """
    dropped = figures.totals(evidence.run, "calls", "dropped")
    left_out = sum(dropped.get(reason, 0) for reason in WORTHLESS)
    if left_out > LEFT_OUT * (left_out + figures.totals(evidence.run, "calls").get("trained", 0)):
        return
    steps, entropy = entropies(evidence)
    idle = len(steps) < len(evidence.run.steps)
    alike_steps, alike = figures.series(evidence.run, "zero_variance_groups")
    few = max(2, quarter(entropy))  # a single step may be chance
    early = mean(entropy[:few]) if len(entropy) >= few else None
    same = mean(alike) or 0.0
    # the rollouts of the first step that changed the policy are the last ones that nothing had changed
    change = next(
        (s for s, v in zip(*figures.series(evidence.run, "algorithm", "weight_change"), strict=True) if v), None
    )
    untouched = [value for s, value in zip(alike_steps, alike, strict=True) if change is None or s <= change]
    if early is None or early >= LOW_ENTROPY or min(same, mean(untouched) or 0.0) <= ALIKE or gained(evidence):
        return
    single, of_these = evidence.total("same"), evidence.total("same_right")
    if of_these > 0.9 * single and evidence.total("right") > EASY * evidence.total("scored"):  # sure, and right
        if not any(found.level == "problem" for found in zero_variance(evidence)):
            yield constant(evidence, evidence.steps)
        return
    low = [s for s, value in zip(steps, entropy, strict=True) if value < LOW_ENTROPY]
    yield problem(
        "low-entropy",
        f"the entropy of the trained calls was {figure(early)} nats a token from the first steps on (mean of "
        f"{so_many(few)}), and in {same:.0%} of all groups all rollouts got the same reward: they are too alike to "
        "learn from",
        seen=(len(low), len(steps), "steps with an update" if idle else "steps"),
        since=low[0],
        settings=("algorithm.temperature", "algorithm.model", *evidence.setting("algorithm.group_size")),
        advice="Sample with a higher temperature or more rollouts a task, or start from a model that was trained less "
        "on right answers (agentrig warmup with fewer labels or passes).",
        lost=same,
        explains=("zero-variance-groups", "learning-rate-too-small"),
    )


def collapsed(evidence: Evidence) -> Iterator[Finding]:
    """A reward that has fallen far below what it was: at once, in steps that taught nothing more, or by the end."""
    steps, width = evidence.steps, quarter(evidence.steps)
    lifeless = lasting(steps, lambda facts: facts.same > ZERO_VARIANCE_LIMIT * facts.groups)
    for late in (evidence.silent, lifeless, steps[-width:]):
        before = steps[: len(steps) - len(late)]
        windows = [before[i : i + width] for i in range(0, len(before), width)]
        if not late or not windows:
            continue
        best = max(windows, key=lambda w: mean(rewards_of(w)) or 0.0)
        high, low = mean(rewards_of(best)), mean(rewards_of(late))
        fall = change(best, late)
        if high is None or low is None or max(low - FALLEN * high, fall.after - FALLEN * fall.before) > 0:
            continue
        # where the run ended itself, it is no chance that groups have become alike
        of_all = change(before, late)
        low_for_all = late is evidence.silent and of_all.after <= FALLEN * of_all.before
        if low_for_all or -fall.errors >= (LIKELY if late is evidence.silent else SURE):
            yield _far_below(evidence, best, late, high, low)
            return
    yield from _fell(evidence)


def _far_below(
    evidence: Evidence, best: Sequence[StepFacts], late: Sequence[StepFacts], high: float, low: float
) -> Finding:
    """Say how far the reward fell, from which steps to which, and whether the policy was destroyed by it."""
    ends = [named([facts.step for facts in part]) for part in (best, late)]
    text = f"the mean reward fell from {high:.3g} ({ends[0]}) to {low:.3g} ({ends[1]})"

    def low_in(facts: StepFacts) -> bool:
        return facts.reward <= FALLEN * high * facts.scored

    fallen = lasting(evidence.steps, low_in) or late
    early = fallen[0].step - evidence.steps[0].step <= AT_ONCE
    alike = total(late, "same") > ZERO_VARIANCE_LIMIT * total(late, "groups")
    at_once = alike and late[0].step - best[-1].step <= AT_ONCE
    if at_once:
        shares = [f"{total(part, 'same')} of {amount(total(part, 'groups'), 'group')}" for part in (best, late)]
        text = (
            f"{'the first updates' if early else 'an update'} destroyed the policy: {text}; all rollouts got the same "
            f"reward in {shares[0]} before, and in {shares[1]} since then"
        )
    elif early:
        text = f"right after the first updates, {text}"
    broken = " If it is not to blame: did the agent or the reward break in between?" if evidence.silent else ""
    return problem(
        "learning-rate-too-large",
        f"{text}{_signs(evidence)}",
        seen=(sum(map(low_in, fallen)), len(evidence.steps), "steps"),
        since=fallen[0].step,
        settings=settings_of_rate(evidence),
        advice=f"{lower_rate(evidence, hundredth=at_once and low < NOTHING_LEFT * high)}{broken}",
        lost=min(1.0, 1 - low / high) if high > 0 else 1.0,
        explains=(
            "entropy-collapse",
            "low-entropy",
            "tasks-too-hard",
            "constant-reward",
            "zero-variance-groups",
            "clip-fraction",
            "no-exploration",
            "truncated-answers",
            "stale-rollouts",
            "weights-unchanged",
            "no-answers",
        ),
    )


def settings_of_rate(evidence: Evidence) -> tuple[str, ...]:
    """Return the settings to change where the learning rate is too large."""
    return (*evidence.setting(*LR), "algorithm.warmup_steps", "algorithm.kl_loss_coef", "algorithm.final")


def _highest(evidence: Evidence, key: str) -> float | None:
    """Return the highest value that a setting had in a step: a resume may have changed it."""
    steps = [int(line["step"]) for line in evidence.run.steps] or [1]
    values = (number(evidence.run.setting_at(step, key)) for step in steps)
    return max((value for value in values if value is not None), default=None)


def lower_rate(evidence: Evidence, *, hundredth: bool = False) -> str:
    """Return the advice to train again with a tenth, or a hundredth, of the learning rate, with the command."""
    key = evidence.setting(*LR)[0]
    lr = _highest(evidence, key)
    less, part = (100, "hundredth") if hundredth else (10, "tenth")
    rate = f" of {lr:.3g}" if lr else ""
    again = train_again(evidence, f"{key}={lr / less:.3g}") if lr else ""
    kept = evidence.value("algorithm.final") == "best"
    keep = "" if kept else '; algorithm.final = "best" keeps the best weights'
    warmed = number(evidence.value("algorithm.warmup_steps")) or 0
    warm_up = f"warm it up longer (warmup_steps is {warmed:.0f})" if warmed else "warm it up (warmup_steps)"
    return (
        f"The learning rate{rate} is the likely cause. Use a {part} of it{again and ': '}{again or '.'}\n"
        f"Or {warm_up}{keep}."
    )


def _fell(evidence: Evidence) -> Iterator[Finding]:
    """A reward that falls surely, but not far; where the answers stayed the same, it is the tasks that differ.

    Nor is it said of a run that got better on the tasks that were measured, which are the same at both ends.
    """
    if reward_trend(evidence) > -LIKELY or _same_answers(evidence) or gained(evidence):
        return
    width = quarter(evidence.steps)
    first, last = evidence.steps[:width], evidence.steps[-width:]
    scored = [max(1, total(steps, "scored")) for steps in (first, last)]
    reward = [sum(facts.reward for facts in steps) / n for steps, n in zip((first, last), scored, strict=True)]
    right = [total(steps, "right") / n for steps, n in zip((first, last), scored, strict=True)]
    steps = so_many(width)
    yield Finding(
        "warn",
        f"training got worse: the mean reward fell from {reward[0]:.3g} in the first {steps} to {reward[1]:.3g} in the "
        f"last, right answers from {right[0]:.0%} to {right[1]:.0%}; try a lower {evidence.setting(*LR)[0]}",
    )


def _signs(evidence: Evidence) -> str:
    """Name figures of the update that changed much."""
    words = []
    for name, words_of in (("kl", "KL to the sampling policy"), ("grad_norm", "gradient norm"), ("entropy", "entropy")):
        steps, values = figures.series(evidence.run, "algorithm", name)
        if values and max(values) > 10 * max(values[0], 1e-3):
            at = steps[values.index(max(values))]
            words.append(
                f"{words_of} rose from {figure(values[0])} (step {steps[0]}) to {figure(max(values))} (step {at})"
            )
    return f"; the {' and the '.join(words)}" if words else ""


def clipped(evidence: Evidence) -> Iterator[Finding]:
    """Tokens whose gradient ended at the clip."""
    steps, values = figures.series(evidence.run, "algorithm", "clip_fraction")
    share = mean(values) or 0.0
    if share <= CLIPPED or gained(evidence):
        return
    yield problem(
        "clip-fraction",
        f"{share:.0%} of the trained tokens were clipped (mean of {amount(len(values), 'step')}): the policy moved "
        "further within a step than the loss allows",
        seen=(sum(v > CLIPPED for v in values), len(values), "steps"),
        since=next(s for s, v in zip(steps, values, strict=True) if v > CLIPPED),
        settings=("algorithm.ppo_epochs", "algorithm.mini_batches", *evidence.setting(*LR), "algorithm.clip_high"),
        advice="Make fewer updates of a step's rollouts, or smaller ones.",
        lost=share,
    )


def penalized(evidence: Evidence) -> Iterator[Finding]:
    """A KL loss that outweighs the reward."""
    steps, kl = figures.series(evidence.run, "algorithm", "kl_reference")
    _, loss = figures.series(evidence.run, "algorithm", "loss")
    coefs = [number(evidence.run.setting_at(step, "algorithm.kl_loss_coef")) or 0.0 for step in steps]
    if not any(coefs) or len(kl) < FEW_STEPS or len(kl) != len(loss) or gained(evidence):
        return
    parts = zip(steps, coefs, kl, loss, strict=True)
    over = [step for step, coef, k, whole in parts if coef * k > abs(whole - coef * k)]
    if at_least(len(over), len(kl)) <= 0.5:
        return
    yield problem(
        "kl-too-strong",
        f"the KL loss was larger than the loss of the rewards in {len(over)} of {len(kl)} steps: its weight is "
        f"{' and '.join(f'{coef:g}' for coef in dict.fromkeys(coefs))}, the KL to the starting model "
        f"{figure(mean(kl))} nats a token (mean of these steps)",
        seen=(len(over), len(kl), "steps"),
        since=over[0],
        settings=("algorithm.kl_loss_coef",),
        advice="Divide kl_loss_coef by 10 or more; 0 leaves it out.",
        explains=("learning-rate-too-small",),
    )


def stale(evidence: Evidence) -> Iterator[Finding]:
    """Steps that learned from rollouts of earlier weights, and how much of that was corrected."""
    run = evidence.run
    behind = [line for line in run.steps if (number(line.get("max_staleness")) or 0) > 0]
    if not behind:
        return
    most = int(max(number(line.get("max_staleness")) or 0 for line in behind))
    text = f"rollouts of {count(len(behind))} of {count(len(run.steps))} steps were sampled by weights "
    text += "one version behind" if most == 1 else f"up to {most} versions behind"
    steps, cut = figures.series(run, "algorithm", "rollout_is_ratio_fraction_high")
    share = mean(cut)
    if share is not None:
        steps_of = amount(len(cut), "step")
        text += f"; the importance weights of {share:.2%} of their tokens (mean of {steps_of}) were truncated"
    if share is None or share <= TRUNCATED or gained(evidence):
        yield Finding("fact", text)
        return
    yield problem(
        "stale-rollouts",
        text,
        seen=(sum(v > TRUNCATED for v in cut), len(run.steps), "steps"),
        since=next(s for s, v in zip(steps, cut, strict=True) if v > TRUNCATED),
        settings=(
            "algorithm.max_staleness",
            "algorithm.rollout_is_threshold",
            *evidence.setting(*LR),
            "algorithm.ppo_epochs",
        ),
        advice="Let rollouts wait for the update (max_staleness = 0), or make smaller updates.",
        lost=share,
        explains=("clip-fraction",),
    )
