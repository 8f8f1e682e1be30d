"""The reward `spider-graded`: `spider-exec`, with part of the marks for a query that runs and is wrong.

A model of this size fails two questions in three by a name that the schema has not, and then every rollout of a
group gets the same 0. Full marks, and so the accuracy of every measure, are those of `spider-exec`:

    agentrig train tests/benchmarks/verl_spider/run.toml --plugin tests/benchmarks/verl_spider/graded.py
        reward.use=spider-graded …
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
from agentrig_spider.rewards import ExecMatch, ExecMatchReward

from agentrig import Outcome, RewardSpec, Score, Task, hookimpl, setting


@attrs.frozen(kw_only=True)
class GradedConfig:
    """Keys of `spider-graded`."""

    runs: float = setting(0.2, ge=0, lt=1, help="Value of a query that runs and returns something else than the gold.")


def graded(score: Score, runs: float) -> Score:
    """Return a verdict of `spider-exec` with the value of a wrong query that runs, a timeout not being one."""
    if score.status == "ok" and score.value == 0.0 and score.components["executes"]:
        return attrs.evolve(score, value=runs)
    return score


class GradedReward:
    """Asks `spider-exec`, then grades."""

    def __init__(self, config: GradedConfig) -> None:
        self._exec = ExecMatchReward(ExecMatch("official"))
        self._runs = config.runs

    def __call__(self, task: Task, outcome: Outcome, budget_s: float) -> Score:
        """Score one outcome."""
        return graded(self._exec(task, outcome, budget_s), self._runs)

    def score_many(self, items: Sequence[tuple[Task, Outcome]], budget_s: float) -> Sequence[Score]:
        """Score a batch."""
        return [graded(score, self._runs) for score in self._exec.score_many(items, budget_s)]


@hookimpl
def register_rewards() -> Iterable[RewardSpec]:
    """Bring `spider-graded`."""
    yield RewardSpec(
        name="spider-graded",
        summary="1 for a right query, a part of it for a wrong one that runs.",
        config=GradedConfig,
        build=GradedReward,
    )
