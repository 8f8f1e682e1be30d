"""Whether figures really rose or fell: tests that know how few rollouts they look at."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import attrs

from agentrig.figures import SIGNIFICANT, sign_test, wilson
from agentrig.view.causes.evidence import Evidence, StepFacts

SURE = 3.0
"""Standard errors between two means that count as a certain difference."""

LIKELY = 1.96
"""Standard errors between two means that count as a difference."""

ORDERS = 10_000
"""With so many orders of the values of two groups, or more, their number does not limit how sure a difference is."""

ENOUGH = 4
"""Least points of a test for a trend."""

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
    return _errors(gap, spread, len(before), len(after))


def _errors(gap: float, spread: float, n: int, m: int) -> float:
    if gap == 0:
        return 0.0
    orders = math.comb(n + m, n)
    most = statistics.NormalDist().inv_cdf(1 - 1 / orders) if orders < ORDERS else math.inf
    return math.copysign(min(abs(gap) / spread if spread else math.inf, most), gap)


@attrs.frozen
class Change:
    """The mean reward of some steps and of later ones, and how many standard errors lie between: see `change`."""

    before: float = 0.0
    after: float = 0.0
    errors: float = 0.0


def change(before: Sequence[StepFacts], after: Sequence[StepFacts]) -> Change:
    """Return how the mean reward of groups changed, where no mix of classes that differs explains it.

    Of each slice of the tasks, the classes in both are compared with their own, each weighted by its mean share of both
    (direct standardization). Of the changes that are found so, and that of all groups, the least sure one counts.
    """
    values = rewards_of(before), rewards_of(after)
    if not all(values):
        return Change()
    whole = Change(statistics.fmean(values[0]), statistics.fmean(values[1]), difference(*values))
    found = [whole, *filter(None, (_within(name, before, after) for name in _slices([*before, *after])))]
    least = min(found, key=lambda each: each.errors if whole.errors > 0 else -each.errors)
    return least if least.errors * whole.errors > 0 else attrs.evolve(least, errors=0.0)


def _within(name: str, before: Sequence[StepFacts], after: Sequence[StepFacts]) -> Change | None:
    """Return the change within the classes of a slice; None if these are too few, or most groups are of others."""
    ends = [_by_class(name, steps) for steps in (before, after)]
    sizes = [len(rewards_of(steps)) for steps in (before, after)]
    both = ends[0].keys() & ends[1].keys()
    counts = [{part: len(end[part]) for part in both} for end in ends]
    free = [sum(of.values()) - len(both) for of in counts]
    if min(free) < 1 or any(2 * sum(of.values()) < n for of, n in zip(counts, sizes, strict=True)):
        return None
    shares = {part: sum(of[part] / sum(of.values()) for of in counts) / 2 for part in both}
    means, variance = [], 0.0
    for end, of, freedom in zip(ends, counts, free, strict=True):
        means.append(sum(shares[part] * statistics.fmean(end[part]) for part in both))
        within = sum(of[part] * statistics.pvariance(end[part]) for part in both) / freedom
        variance += within * sum(shares[part] ** 2 / of[part] for part in both)
    first, last = means
    gap = 0.0 if math.isclose(first, last, abs_tol=1e-9) else last - first
    return Change(first, last, _errors(gap, math.sqrt(variance), *sizes))


def _slices(steps: Sequence[StepFacts]) -> dict[str, None]:
    return dict.fromkeys(name for facts in steps for slices in facts.group_slices for name in slices)


def _by_class(name: str, steps: Sequence[StepFacts]) -> dict[str, list[float]]:
    """Return the mean rewards of the groups of each class of a slice."""
    found = defaultdict[str, list[float]](list)
    for facts in steps:
        for slices, value in zip(facts.group_slices, facts.group_means, strict=False):
            if name in slices:
                found[slices[name]].append(value)
    return found


def trend(values: Sequence[float]) -> float:
    """Return the statistic of the Mann-Kendall test for a trend, in standard errors; 0 for fewer than four values."""
    size = max(1, math.ceil(len(values) / POINTS))
    points = [statistics.fmean(values[i : i + size]) for i in range(0, len(values), size)]
    n = len(points)
    if n < ENOUGH:
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
    higher = change(steps[:width], steps[-width:]).errors > LIKELY
    return higher or reward_trend(evidence) > LIKELY


def reward_trend(evidence: Evidence) -> float:
    """Return `trend` of the mean rewards of the training steps, where no mix of classes that differs explains it.

    For each slice, what a step's classes have in the whole run is subtracted; of the trends, the least sure one counts.
    """
    steps = [facts for facts in evidence.steps if facts.scored]
    values = [facts.reward / facts.scored for facts in steps]
    found = [trend(values)]
    for name in _slices(steps):
        by_step = [_by_class(name, [facts]) for facts in steps]
        tried = Counter(part for parts in by_step for part in parts)
        usual = {part: statistics.fmean(of) for part, of in _by_class(name, steps).items() if tried[part] >= ENOUGH}
        mixes = [[usual[part] for part, of in parts.items() if part in usual for _ in of] for parts in by_step]
        if all(mixes) and 2 * sum(map(len, mixes)) >= len(rewards_of(steps)):
            pairs = zip(values, mixes, strict=True)
            found.append(trend([round(value - statistics.fmean(mix), 9) for value, mix in pairs]))
    return max(0.0, min(found)) if found[0] > 0 else min(0.0, max(found))


def reward_rise(evidence: Evidence) -> float | None:
    """Return by how much the mean reward of training rose if only that did; None if the accuracy rose, or nothing did.

    None too if no tasks were measured at both ends: then the reward is all that is known; and if their mean reward
    moved significantly, which says more.
    """
    judged, told = evidence.changed[3], more_right(evidence) or better_reward(evidence) or lost(evidence)
    if not judged or told or not reward_rose(evidence):
        return None
    width = quarter(evidence.steps)
    rise = change(evidence.steps[:width], evidence.steps[-width:])
    return rise.after - rise.before
