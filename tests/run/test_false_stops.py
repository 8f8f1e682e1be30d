"""Simulated runs: a healthy one is not ended, and one whose reward is constant is ended early."""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rollouts import rollout

from agentrig.errors import RunStopped
from agentrig.rollouts import Rollout
from agentrig.run.guards import NO_SIGNAL
from agentrig.run.trends import Guards

SEEDS = range(int(os.environ.get("AGENTRIG_TEST_SEEDS", "5")))
"""A thousand seeds take half an hour; none of them is ended."""

Step = list[Rollout]
POOL = {(g, v): rollout(v, answer=f"answer {v}", group=str(g)) for g in range(64) for v in (0.0, 1.0)}
"""One rollout for each group and reward: the guard only reads these two."""


def line_of(step: int, rollouts: Step) -> dict[str, Any]:
    """The line of metrics that a run writes for these rollouts; the weights change if a group has unlike rewards."""
    values = [r.value or 0.0 for r in rollouts]
    groups: dict[str, set[float]] = {}
    for r, value in zip(rollouts, values, strict=True):
        groups.setdefault(r.group, set()).add(value)
    alike = statistics.fmean(len(found) == 1 for found in groups.values())
    return {
        "step": step,
        "reward": statistics.fmean(values),
        "reward_std": statistics.pstdev(values),
        "accuracy": statistics.fmean(values),
        "rollouts": len(rollouts),
        "failures": {},
        "groups": len(groups),
        "zero_variance_groups": alike,
        "algorithm": {"weight_change": 0.0 if alike == 1 else 1e-5, "trained_tokens": 0.0 if alike == 1 else 9.0},
    }


def ended(steps: Iterator[Step]) -> tuple[int, str]:
    """Return at which step the real guard ends a run, and why; 0 if it does not. A solved run has ended well."""
    guards = Guards()
    for step, rollouts in enumerate(steps, 1):
        try:
            if guards.check_signal(rollouts, step=step):
                return 0, ""
            line = line_of(step, rollouts)
            guards.add(line)
            guards.check(line)
        except RunStopped as error:
            return step, error.cause
    return 0, ""


def sampled(rng: random.Random, accuracy: float, spread: float, *, groups: int, n: int) -> Step:
    """Rollouts of tasks whose chances of being solved have this mean: the smaller the spread, the more unlike."""
    found = []
    for g in range(groups):
        p = rng.betavariate(accuracy * spread, (1 - accuracy) * spread)
        found += [POOL[g, float(rng.random() < p)] for _ in range(n)]
    return found


def healthy(accuracy: Callable[[int], float], *, steps: int, spread: float, groups: int, n: int, seed: int) -> Any:
    rng = random.Random(seed)
    return (sampled(rng, accuracy(step), spread, groups=groups, n=n) for step in range(steps))


HEALTHY: dict[str, tuple[Callable[[int], float], int, int, tuple[float, ...], tuple[int, ...]]] = {
    "25%": (lambda step: 0.25, 100, 4, (1.0, 4.0), (2, 4, 8, 16)),
    "50%": (lambda step: 0.5, 100, 4, (1.0, 4.0), (2, 4, 8, 16)),
    "87%": (lambda step: 0.87, 300, 8, (0.5, 2.0), (4, 8)),
    "learns fast": (lambda step: min(0.5 + step / 10, 0.985), 300, 8, (2.0,), (8,)),
    "begins with hard tasks": (lambda step: 0.1 + 0.8 * step / 300, 300, 8, (2.0,), (8,)),
    "nearly solved": (lambda step: 0.97 if step > 5 else 0.5, 300, 8, (2.0,), (8,)),
}
"""A name to the accuracy of each step, the number of steps, groups a step, spreads and sizes of groups."""


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_is_not_ended(name: str) -> None:
    accuracy, steps, groups, spreads, sizes = HEALTHY[name]
    for spread in spreads:
        for n in sizes:
            runs = [healthy(accuracy, steps=steps, spread=spread, groups=groups, n=n, seed=s) for s in SEEDS]
            assert [ended(run) for run in runs] == [(0, "")] * len(SEEDS), (spread, n)


@pytest.mark.parametrize(("groups", "within"), [(1, 35), (4, 9), (8, 5), (32, 2)])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_constant_reward_from_the_start_ends_a_run_within_a_few_steps(value: float, groups: int, within: int) -> None:
    same = ([POOL[g, value] for g in range(groups) for _ in range(4)] for _ in range(100))
    step, cause = ended(same)
    assert cause == NO_SIGNAL
    if value:  # a reward that ignores the answer
        assert within <= step <= within * 3 / 2 + 1
    else:
        assert step == within


def test_a_reward_that_breaks_later_ends_a_run() -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        good = [sampled(rng, 0.5, 2.0, groups=8, n=4) for _ in range(100)]
        broken = [[POOL[g, 0.0] for g in range(8) for _ in range(4)]] * 100
        step, cause = ended(iter([*good, *broken]))
        assert (101 < step < 108, cause) == (True, NO_SIGNAL), (seed, step)


def test_rollouts_of_a_task_that_are_all_alike_end_a_run() -> None:
    """Greedy sampling: every group agrees, while the tasks differ."""
    for seed in SEEDS:
        rng = random.Random(seed)
        steps = [[r for g in range(8) for r in [POOL[g, float(rng.random() < 0.5)]] * 4] for _ in range(100)]
        step, cause = ended(iter(steps))
        assert (8 < step < 20, cause) == (True, NO_SIGNAL), (seed, step)
