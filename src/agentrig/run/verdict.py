"""Whether a model can be trained by reward, judged from a few sampled rollouts: pass@k, groups that differ, a cure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import attrs

from agentrig.credit import TurnConfig, turns_compared, unscored_calls
from agentrig.figures import SIGNIFICANT, mean, wilson
from agentrig.rollouts import Rollout
from agentrig.run.metrics import count_failures, failure_lines, failure_reasons
from agentrig.text import amount, json_text
from agentrig.traces import reply_of

SOLVED = 0.95
"""Share of correct answers from which a model has nothing to learn."""

EASY = 0.75
"""Share of correct answers from which groups are alike because the tasks are easy."""

DIFFER = 0.2
"""Share of groups whose rewards must differ for a model that training is recommended for."""

LITTLE = 0.05
"""How far the mean reward must be above the least one for that, while no answer is correct."""

SOONER = 0.2
"""The `--until` of a warm-up that leaves much to learn."""

WARM_UP = "warm up first (agentrig warmup, docs/how-to/laptop.md), make the tasks easier, or take a larger model"

NEVER = (
    "Warm up longer, with such tasks among the labels (agentrig warmup: more --labels), give demonstrations of them, "
    "or reward parts of their answers."
)
"""What to do about classes of tasks that were never right."""

NAMED = 3
"""So many of these are named."""


HARDLY = 0.05
"""Share of right rollouts up to which a class of tasks teaches hardly more than one that is never right."""


def never_right(tried: Mapping[tuple[str, str], Sequence[int]], *, most: float = 0.0, advice: str = f" {NEVER}") -> str:
    """Say which classes of tasks were right in no rollout, though others were; '' if there is none, or by chance.

    They are of one slice, the one that has most of such rollouts, and of such classes: those of another one are most
    often the same rollouts.

    Args:
        tried: Of each class of each slice: how many of its rollouts were right, and how many there were.
        most: The share of right rollouts up to which a class is named too.
        advice: What follows.
    """
    whole: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for (name, _), pair in tried.items():
        whole[name] = [a + b for a, b in zip(whole[name], pair, strict=True)]
    by_slice: dict[str, list[tuple[str, int, int]]] = defaultdict(list)
    for (name, part), (right, n) in sorted(tried.items()):
        rights, others = whole[name][0] - right, whole[name][1] - n
        if right > most * n or not rights:
            continue
        if _at_most(right, n, rights / others) < SIGNIFICANT:
            by_slice[name].append((f"{name}={part}", n, right))
    if not by_slice:
        return ""
    found = max(by_slice.values(), key=lambda classes: (sum(n for _, n, _ in classes), len(classes)))
    hardly = any(right for *_, right in found)
    counts = [f"{right} of {n}" if hardly else f"{n}" for _, n, right in found]
    (first, n, _), *more = found[:NAMED]
    words = [f"{first} ({counts[0]} rollout{'s' * (n != 1)})"]
    words += [f"{name} ({count})" for (name, *_), count in zip(more, counts[1:], strict=False)]
    if len(found) > NAMED:
        words.append(f"{len(found) - NAMED} more")
    seldom, teaches = ("hardly ever", "teaches little of") if hardly else ("never", "can't teach")
    were = "were" if len(found) > 1 else "was"
    return f"{' and '.join(words)} {were} {seldom} right: reward {teaches} what is {seldom} right.{advice}"


def _at_most(right: int, n: int, p: float) -> float:
    """Return how likely at most so many of n rollouts are right, if each is with the probability p > 0."""
    if p == 1:
        return float(right == n)
    return math.fsum(
        math.exp(math.log(math.comb(n, k)) + k * math.log(p) + (n - k) * math.log1p(-p)) for k in range(right + 1)
    )


def by_class(scored: Iterable[tuple[Mapping[str, str], bool]]) -> dict[tuple[str, str], list[int]]:
    """Return what `never_right` takes, from the slices of scored rollouts and whether each was right."""
    tried: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for slices, right in scored:
        for of in slices.items():
            tried[of] = [tried[of][0] + right, tried[of][1] + 1]
    return dict(tried)


@attrs.frozen(kw_only=True)
class Verdict:
    """Whether a model can be trained by reward.

    Attributes:
        kind: `good`; `solved`: little is left to learn; `hopeless`: too few groups differ, so hardly anything can be
            learned; `failing`: too many rollouts failed to tell.
        message: Why, and what to do.
    """

    kind: Literal["good", "solved", "hopeless", "failing"]
    message: str


def pass_at(k: int, tasks: Sequence[tuple[int, int]]) -> float | None:
    """Return pass@k: how likely is at least one of k rollouts of a task correct? The mean over the tasks.

    For each task with n rollouts, c of them correct, it is the unbiased 1 - C(n - c, k) / C(n, k) (Chen et al. 2021,
    arXiv:2107.03374, equation 1).

    Args:
        k: At least 1.
        tasks: n and c of each task. Those with n < k are left out: rollouts that failed are not counted in n.

    Returns:
        None if no task has k rollouts.
    """
    return mean([1 - math.comb(n - c, k) / math.comb(n, k) for n, c in tasks if n >= k])


def differing(groups: Sequence[Sequence[float]], size: int) -> float:
    """Return the share of tasks for which the rewards of `size` rollouts are not all the same.

    A task with n rollouts, c_v of them with the reward v, counts 1 - sum_v C(c_v, m) / C(n, m) with m = min(n, size):
    without bias for n >= size, at most the true share for fewer. If no task has two rollouts, the share is estimated
    as if all tasks were equally hard.

    Args:
        groups: The rewards of each task's rollouts, without failures.
        size: Rollouts of one task in a training step.
    """
    if all(len(values) < 2 for values in groups):
        counts = Counter(value for values in groups for value in values)
        return 1 - math.fsum((count / counts.total()) ** size for count in counts.values())
    shares = []
    for values in groups:
        m = min(len(values), size)
        if m > 1:
            alike = sum(math.comb(count, m) for count in Counter(values).values())
            shares.append(1 - alike / math.comb(len(values), m))
    return mean(shares) or 0.0


def learned_rewards(group: Sequence[Rollout], size: int, credit: Any = None) -> list[float]:
    """Return the rewards of a task that its rollouts are compared by: their own, or under `turn` those of one turn.

    Of the turns it is the one whose calls' rewards are most likely to differ.

    Args:
        size: Rollouts of one task in a training step.
        credit: The settings of the run's credit.
    """
    scored = [rollout for rollout in group if rollout.value is not None]
    turns = turns_compared(scored, credit)
    if turns is None:
        return [rollout.value for rollout in scored if rollout.value is not None]
    return max(turns, key=lambda values: differing([values], size), default=[])


def sure_and_random(groups: Sequence[Sequence[Rollout]]) -> tuple[float, float]:
    """Return two shares of the tasks with equal rewards: of those that the model is sure of, and of random replies.

    It is sure of a task whose answers are all right, or whose rollouts have one and the same replies; a single rollout
    counts if it is right, and a model that is never right is sure of nothing. Replies are random where none leads to a
    right answer and more than half are different.
    """
    scored = [[r for r in group if r.value is not None] for group in groups]
    alike = [group for group in scored if len({r.value for r in group}) == 1]
    ever = any(r.correct for group in scored for r in group)
    sure = [
        ever and (all(r.correct for r in group) or (len(group) > 1 and len({replies_of(r) for r in group}) == 1))
        for group in alike
    ]
    differ = [
        len(group) > 1 and not any(r.correct for r in group) and len({replies_of(r) for r in group}) > len(group) / 2
        for group in alike
    ]
    return mean(sure) or 0.0, mean(differ) or 0.0


def replies_of(rollout: Rollout) -> str:
    """Return the replies of a rollout's calls: an agent may return one answer for all that are wrong in form.

    Its answer stands for replies that were not recorded.
    """
    calls = rollout.trace.llm_calls()
    replies = [reply_of(call.attributes) for call in calls]
    return json_text(replies if any(replies) else rollout.outcome.answer)


def judge(
    groups: Sequence[Sequence[Rollout]],
    size: int,
    *,
    failure_limit: float = 1.0,
    cure: str = "",
    less: str = "",
    credit: Any = None,
) -> Verdict:
    """Say whether a model can be trained by reward.

    Args:
        groups: Rollouts of training tasks, sampled as in training: those of one task are a group, and one is enough.
        size: Rollouts of one task in a training step.
        failure_limit: The share of rollouts that may fail in a step, `run.failure_limit`.
        cure: What to do if too few groups differ; left out: what any model can do.
        less: The same for a model that is too sure of its answers: of most tasks, by `sure_and_random`.
        credit: The settings of the run's credit: `turn` learns from rewards of calls.
    """
    rollouts = [rollout for group in groups for rollout in group]
    rewards = [learned_rewards(group, size, credit) for group in groups]
    values = [r.value for r in rollouts if r.value is not None]
    failures = count_failures(rollouts)
    failed = sum(failures.values())
    if not values or failed > failure_limit * len(rollouts):
        what = "No rollout was scored"
        if values:
            what = (
                f"{failed} of {amount(len(rollouts), 'rollout')} failed. A run stops in a step with more than "
                f"{failure_limit:.0%} (run.failure_limit)"
            )
        lines = failure_lines(failure_reasons(rollouts)) or ["none ran"]
        return Verdict(
            kind="failing", message=f"{what}; see one with agentrig dev:\n" + "\n".join(f"  {line}" for line in lines)
        )
    accuracy = sum(bool(r.correct) for r in rollouts) / len(values)
    tried = by_class((r.task.slices, bool(r.correct)) for r in rollouts if r.value is not None)
    never = never_right(tried, most=HARDLY)
    but, of = f" But {never}" if never else "", ""
    and_never = f" {never_right(tried, most=HARDLY, advice='')}".rstrip()  # the cure follows
    if accuracy >= SOLVED:
        message = "The model already solves nearly all training tasks: little is left for training. Use harder tasks."
        return Verdict(kind="solved", message=f"{message}{but}")
    if isinstance(credit, TurnConfig):
        if why := unscored_calls(rollouts):
            return Verdict(
                kind="hopeless", message=f"Don't train this model by reward yet: {why}.{f' {never}' if never else ''}"
            )
        values, of = [value for group in rewards for value in group] or values, " of calls"
    differ, average = differing(rewards, size), math.fsum(values) / len(values)
    are = "are" if any(len(group) > 1 for group in rewards) else "would be"
    learns = (
        f"training learns from tasks whose {size} rollouts get rewards{of} that differ, and these {are} about "
        f"{differ:.0%} of the tasks"
    )
    judged = sum(len(group) > 1 for group in rewards)
    if judged:
        low, high = wilson(differ * judged, judged)
        learns += f" (95%: {low:.0%} to {high:.0%})"
    sure, random = sure_and_random(groups)
    why, general = "", f"Raise the temperature (algorithm.temperature), {WARM_UP}."
    warm_up = f"{WARM_UP[0].upper()}{WARM_UP[1:]}"
    if min(values) == max(values) and not accuracy:
        each = "scored call" if of else "sampled answer"
        why = (
            f"every {each} has the reward {values[0]:g}, and no answer is correct: reinforcement learning would "
            "start at zero and learn nothing"
        )
        general = f"{warm_up}; raising the temperature (algorithm.temperature) may help too."
    elif differ < DIFFER:
        if accuracy >= EASY:
            message = (
                f"Little is left for training: {accuracy:.0%} of the sampled answers are correct already, and {learns} "
                "only. Use harder tasks, or raise the temperature (algorithm.temperature)."
            )
            return Verdict(kind="solved", message=f"{message}{but}")
        why = f"{learns} only"
        if sure > 0.5:
            why += (
                f". The model is too sure: for {sure:.0%} of the other tasks, all its answers are right, or all its "
                "replies the same"
            )
            cure = less or (
                "Raise the temperature (algorithm.temperature), or use other tasks; for a model of agentrig warmup: "
                f"fewer --passes{f', or --until {SOONER}' if accuracy > SOONER else ''}."
            )
    elif not accuracy and average - min(values) < LITTLE:
        why = (
            f"no sampled answer is correct, and the mean reward is {average:.3g}, hardly more than the least: training "
            "would hardly begin"
        )
    if why and random > 0.5:
        why += f". For {random:.0%} of the tasks with equal rewards, its replies are different, and none is right"
        cure = cure or f"{warm_up}; for a model of agentrig warmup: more --labels or --passes."
        cure += " A lower temperature (algorithm.temperature) may help too."
    if why:
        message = f"Don't train this model by reward yet: {why}.{and_never} {cure or general}"
        return Verdict(kind="hopeless", message=message)
    enough = learns if accuracy else f"no sampled answer is correct yet, but {learns}"
    return Verdict(kind="good", message=f"You can train this model by reward: {enough}.{but}")
