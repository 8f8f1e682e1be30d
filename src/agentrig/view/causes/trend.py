"""Whether figures really rose or fell: tests that know how few rollouts they look at."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from agentrig.figures import SIGNIFICANT, sign_test, wilson
from agentrig.view.causes.evidence import Evidence, StepFacts

SURE = 3.0
"""Standard errors between two means that count as a certain difference."""

LIKELY = 1.96
"""Standard errors between two means that count as a difference."""

ORDERS = 10_000
"""With so many orders of the values of two groups, or more, their number does not limit how sure a difference is."""

POINTS = 100
"""Most points of a test for a trend: longer series become means of neighbors."""


def at_least(count: float, of: float) -> float:
    """Return the lower end of a share's 95% interval."""
    return wilson(count, of)[0] if of else 0.0


def at_most(count: float, of: float) -> float:
    """Return the upper end of a share's 95% interval."""
    return wilson(count, of)[1] if of else 1.0


def quarter(steps: Sequence[object]) -> int:
    """Return how many steps a quarter of the run has, at least one: what all causes mean by "the last steps"."""
    return max(1, len(steps) // 4)


def named(steps: Sequence[int]) -> str:
    """Return `step 4` or `steps 4 to 7`."""
    first, last = steps[0], steps[-1]
    return f"step {first}" if first == last else f"steps {first} to {last}"


def so_many(n: int) -> str:
    """Return `step` or `3 steps`: what follows "the first" or "the last"."""
    return "step" if n == 1 else f"{n} steps"


def lasting(steps: Sequence[StepFacts], holds: Callable[[StepFacts], bool]) -> Sequence[StepFacts]:
    """Return the last steps, in most of which something holds, and in less than half of those before; else none."""
    best = score = 0
    begin = len(steps)
    for i in reversed(range(len(steps))):
        score += 1 if holds(steps[i]) else -1
        if score >= max(1, best):
            best, begin = score, i
    return steps[begin:]


def rewards_of(steps: Sequence[StepFacts]) -> list[float]:
    """Return the mean reward of each group of these steps."""
    return [mean for facts in steps for mean in facts.group_means]


def difference(before: Sequence[float], after: Sequence[float]) -> float:
    """Return how many standard errors the mean of `after` is above that of `before`; 0 for fewer than two each.

    Of few values it is at most what the surest test of their order could say: two and two values that don't overlap
    come about by chance in one of six cases.
    """
    if len(before) < 2 or len(after) < 2:
        return 0.0
    gap = statistics.fmean(after) - statistics.fmean(before)
    spread = math.sqrt(statistics.variance(before) / len(before) + statistics.variance(after) / len(after))
    if gap == 0:
        return 0.0
    orders = math.comb(len(before) + len(after), len(before))
    most = statistics.NormalDist().inv_cdf(1 - 1 / orders) if orders < ORDERS else math.inf
    return math.copysign(min(abs(gap) / spread if spread else math.inf, most), gap)


def trend(values: Sequence[float]) -> float:
    """Return the statistic of the Mann-Kendall test for a trend, in standard errors; 0 for fewer than four values."""
    size = max(1, math.ceil(len(values) / POINTS))
    points = [statistics.fmean(values[i : i + size]) for i in range(0, len(values), size)]
    n = len(points)
    if n < 4:
        return 0.0
    pairs = sum((b > a) - (b < a) for i, a in enumerate(points) for b in points[i + 1 :])
    return float(pairs - (pairs > 0) + (pairs < 0)) / math.sqrt(n * (n - 1) * (2 * n + 5) / 18)


def gained(evidence: Evidence) -> bool:
    """Whether the run got better: on the tasks that were measured at both ends, or in training and not worse there."""
    rise = reward_rose(evidence) and not evidence.rescored
    return more_right(evidence) or better_reward(evidence) or (rise and not lost(evidence))


def more_right(evidence: Evidence) -> bool:
    """Whether significantly more of the tasks that were measured at both ends are right at the end."""
    return rose(*evidence.learned)


def rose(better: int, worse: int) -> bool:
    """Whether significantly more tasks got right than wrong."""
    return better > worse and sign_test(better, worse) <= SIGNIFICANT


def fewer_right(evidence: Evidence) -> bool:
    """Whether significantly fewer of the tasks that were measured at both ends are right at the end."""
    better, worse = evidence.learned
    return rose(worse, better)


def better_reward(evidence: Evidence) -> bool:
    """Whether the mean reward of the tasks measured at both ends rose significantly, where not fewer are right."""
    moved = evidence.mean_reward
    return moved is not None and moved.sign > 0 and not (evidence.rescored or fewer_right(evidence))


def worse_reward(evidence: Evidence) -> bool:
    """Whether the mean reward of the tasks measured at both ends fell significantly, where not more are right."""
    moved = evidence.mean_reward
    return moved is not None and moved.sign < 0 and not (evidence.rescored or more_right(evidence))


def lost(evidence: Evidence) -> bool:
    """Whether the run got worse on the tasks that were measured at both ends."""
    return fewer_right(evidence) or worse_reward(evidence)


def reward_rose(evidence: Evidence) -> bool:
    """Whether the mean reward of training rose significantly; that of demonstrations says nothing of the model."""
    steps, width = evidence.steps, quarter(evidence.steps)
    if len(steps) < 2 or evidence.demonstrated:
        return False
    higher = difference(rewards_of(steps[:width]), rewards_of(steps[-width:])) > LIKELY
    return higher or reward_trend(evidence) > LIKELY


def reward_trend(evidence: Evidence) -> float:
    """Return `trend` of the mean rewards of the training steps."""
    return trend([facts.reward / facts.scored for facts in evidence.steps if facts.scored])


def reward_rise(evidence: Evidence) -> float | None:
    """Return by how much the mean reward of training rose if only that did; None if the accuracy rose, or nothing did.

    None too if no tasks were measured at both ends: then the reward is all that is known; and if their mean reward
    moved significantly, which says more.
    """
    judged, told = evidence.changed[3], more_right(evidence) or better_reward(evidence) or lost(evidence)
    if not judged or told or not reward_rose(evidence):
        return None
    width = quarter(evidence.steps)
    first, last = rewards_of(evidence.steps[:width]), rewards_of(evidence.steps[-width:])
    return statistics.fmean(last) - statistics.fmean(first) if first and last else None
