"""The rewards by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal

import attrs

from agentrig import Outcome, RewardSpec, Score, Task, setting
from agentrig_spider.rewards.exec_match import ExecMatch


@attrs.frozen(kw_only=True)
class ExecMatchConfig:
    """Keys of `spider-exec` and `spider-exec-strict`."""

    timeout_s: float = setting(10.0, gt=0, help="Wall seconds that judging one answer may take.")


class ExecMatchReward:
    """Scores outcomes whose answer is SQL; the database is in the task's input, the gold in its private part."""

    def __init__(self, match: ExecMatch) -> None:
        self._match = match

    def __call__(self, task: Task, outcome: Outcome, budget_s: float) -> Score:
        """Score one outcome within `budget_s` wall seconds."""
        try:
            database, gold = task.input["database"], task.private["gold"]
        except KeyError as error:
            return Score.invalid(
                f"the task {task.id} has no {error.args[0]!r}: the reward needs input['database'] and private['gold']"
            )
        if not isinstance(outcome.answer, str):
            return Score.invalid(
                f"the answer is no text but {type(outcome.answer).__name__}; the agent must return SQL as str"
            )
        return self._match.score(outcome.answer, gold, database, budget_s=budget_s)

    def score_many(self, items: Sequence[tuple[Task, Outcome]], budget_s: float) -> Sequence[Score]:
        """Score a batch; equal answers to one task are scored once."""
        known: dict[Any, Score] = {}
        scores = []
        for task, outcome in items:
            key = (task.input.get("database"), task.private.get("gold"), outcome.answer)
            if not isinstance(outcome.answer, str):
                scores.append(self(task, outcome, budget_s))
                continue
            if key not in known:
                known[key] = self(task, outcome, budget_s)
            scores.append(known[key])
        return scores


def _build(mode: Literal["official", "strict"], config: ExecMatchConfig) -> ExecMatchReward:
    return ExecMatchReward(ExecMatch(mode, timeout_s=config.timeout_s))


def specs() -> Iterable[RewardSpec]:
    """Return the rewards of this plugin."""
    return [
        RewardSpec(
            name="spider-exec",
            summary="1 where the query returns what the gold returns, as Spider's official evaluator judges.",
            config=ExecMatchConfig,
            build=partial(_build, "official"),
        ),
    ]
