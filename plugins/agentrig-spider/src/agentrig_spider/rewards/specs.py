"""The rewards by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from agentrig import Outcome, RewardSpec, Score, Task, setting
from agentrig_spider.rewards.exec_match import ExecMatch
from agentrig_spider.sandbox import fingerprint


@attrs.frozen(kw_only=True)
class ExecMatchConfig:
    """Keys of `spider-exec`."""

    timeout_s: float = setting(10.0, gt=0, help="Time limit for scoring one answer, in wall seconds.")
    memory_mb: float = setting(64.0, ge=8, help="Memory limit of SQLite for one query, in MiB.")


@attrs.frozen(kw_only=True)
class StrictConfig(ExecMatchConfig):
    """Keys of `spider-exec-strict`."""

    copies: str = setting("", help="Folder from `agentrig data perturb --out`; empty: the one beside each database.")


class ExecMatchReward:
    """Scores outcomes whose answer is SQL; the database is in the task's input, the gold in its private part.

    If a database has changed since the run first used it, the score is `invalid`: gold and prediction would run on
    data that the agent, for example, has changed.
    """

    def __init__(self, match: ExecMatch) -> None:
        self._match = match
        self._seen: dict[str, tuple[int, ...]] = {}

    def __call__(self, task: Task, outcome: Outcome, budget_s: float) -> Score:
        """Score one outcome within `budget_s` wall seconds."""
        unfit = self._unfit(task, outcome)
        if unfit is not None:
            return unfit
        return self._match.score(outcome.answer, task.private["gold"], task.input["database"], budget_s=budget_s)

    def score_many(self, items: Sequence[tuple[Task, Outcome]], budget_s: float) -> Sequence[Score]:
        """Score a batch; equal answers to one task are scored once, slow queries run in parallel."""
        scores: list[Score | None] = [self._unfit(task, outcome) for task, outcome in items]
        fit = [index for index, score in enumerate(scores) if score is None]
        asked = [
            (items[index][1].answer, items[index][0].private["gold"], items[index][0].input["database"])
            for index in fit
        ]
        for index, score in zip(fit, self._match.score_many(asked, budget_s=budget_s), strict=True):
            scores[index] = score
        return [score for score in scores if score is not None]

    def _changed(self, database: str) -> str:
        """Return how a database has changed since it was first used; empty if it has not."""
        try:
            mark = fingerprint(database)
        except OSError:
            return ""  # `ExecMatch` reports what is wrong with it
        now = (mark.device, mark.inode, mark.size, mark.modified)
        if self._seen.setdefault(database, now) == now:
            return ""
        return (
            f"the database {database} was changed or replaced during the run, so no answer can be scored on it: find "
            "what writes to it (an agent that opens it itself should use mode=ro), restore it, make the file read-only"
        )

    def _unfit(self, task: Task, outcome: Outcome) -> Score | None:
        """Return the score of an outcome that can't be run; None if it can."""
        for where, key in (("input", "database"), ("private", "gold")):
            if not isinstance(getattr(task, where).get(key), str):
                return Score.invalid(f"task {task.id} has no text {where}[{key!r}], which this reward needs")
        if not isinstance(outcome.answer, str):
            return Score.invalid(
                f"the answer is of type {type(outcome.answer).__name__}; the agent must return SQL as str"
            )
        changed = self._changed(task.input["database"])
        return Score.invalid(changed) if changed else None


def _official(config: ExecMatchConfig) -> ExecMatchReward:
    return ExecMatchReward(ExecMatch("official", timeout_s=config.timeout_s, memory_mb=config.memory_mb))


def _strict(config: StrictConfig) -> ExecMatchReward:
    match = ExecMatch("strict", timeout_s=config.timeout_s, memory_mb=config.memory_mb, copies=config.copies or None)
    return ExecMatchReward(match)


def specs() -> Iterable[RewardSpec]:
    """Return the rewards of this plugin."""
    return [
        RewardSpec(
            name="spider-exec",
            summary="1 if the query returns what the gold returns, by the rules of Spider's official evaluator.",
            config=ExecMatchConfig,
            build=_official,
        ),
        RewardSpec(
            name="spider-exec-strict",
            summary="spider-exec without its weaknesses: order, DISTINCT, empty results, constants, copies.",
            config=StrictConfig,
            build=_strict,
        ),
    ]
