"""The reward `partial-credit`: 1 for the right result, a little for a query that at least runs."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from typing import Any

import attrs

from agentrig import Outcome, RewardSpec, Score, Task, hookimpl, setting


@attrs.frozen(kw_only=True)
class Config:
    """The settings: `[reward]` of a run file."""

    runs: float = setting(0.1, help="what a query earns that runs and returns the wrong rows", ge=0, lt=1)


class Reward:
    """What `build` returns: called for each answer, in several threads at once."""

    def __init__(self, config: Config) -> None:
        from agentrig_spider import ExecMatch

        self._config = config
        self._match: Any = ExecMatch(mode="official")

    def __call__(self, task: Task, outcome: Outcome, budget_s: float) -> Score:
        """Return the score of the execution match, raised to the partial credit where the query ran."""
        score: Score = self._match.score(str(outcome.answer), task.private["gold"], task.input["database"])
        if score.status != "ok" or score.value == 1.0:
            return score  # a failure of the environment stays one: never turn it into 0
        ran = float(self._runs(str(outcome.answer), task.input["database"], budget_s))
        return Score.ok(self._config.runs * ran, match=0.0, runs=ran)

    def _runs(self, query: str, database: str, budget_s: float) -> bool:
        with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=budget_s)) as connection:
            steps = iter(range(1000))
            # stops a query after about ten million virtual-machine instructions
            connection.set_progress_handler(lambda: next(steps, None) is None, 10_000)
            try:
                connection.execute(query).fetchmany(1)
            except (sqlite3.Error, sqlite3.Warning):
                return False
        return True


@hookimpl
def register_rewards() -> Iterable[RewardSpec]:
    """Register `partial-credit`."""
    yield RewardSpec(
        name="partial-credit",
        summary="1 for the right result, a little for a query that runs.",
        config=Config,
        build=Reward,
    )
