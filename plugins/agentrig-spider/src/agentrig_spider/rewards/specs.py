"""The rewards by name."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import attrs

from agentrig import Outcome, RewardSpec, Score, Task, Trace, setting
from agentrig.correctness import turn_of
from agentrig_spider.queries import queries_of
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

    With the rollout's trace, each query that the model wrote in it is executed and compared too: `Score.calls`.
    """

    def __init__(self, match: ExecMatch) -> None:
        self._match = match
        self._seen: dict[str, tuple[int, ...]] = {}

    def __call__(self, task: Task, outcome: Outcome, budget_s: float, *trace: Trace) -> Score:
        """Score one outcome within `budget_s` wall seconds."""
        return self.score_many([(task, outcome, *trace)], budget_s)[0]

    def score_many(self, items: Sequence[tuple[Task, Outcome, *tuple[Trace, ...]]], budget_s: float) -> list[Score]:
        """Score a batch of outcomes, each with its trace if its queries are to be scored too.

        Equal queries of one task are scored once, slow ones in parallel.
        """
        end = time.monotonic() + budget_s * len(items)
        unfit = [self._unfit(task, outcome) for task, outcome, *_ in items]
        asked = [
            None if wrong else (outcome.answer, task.private["gold"], task.input["database"])
            for wrong, (task, outcome, *_) in zip(unfit, items, strict=True)
        ]
        answers = [item for item in dict.fromkeys(asked) if item is not None]
        known: dict[object, Score] = dict(zip(answers, self._match.score_many(answers, budget_s=budget_s), strict=True))
        scores = [wrong or known[item] for wrong, item in zip(unfit, asked, strict=True)]
        written: dict[int, list[tuple[str, str, str] | None]] = {}
        for i, (item, (_, _, *trace)) in enumerate(zip(asked, items, strict=True)):
            if trace and item is not None and scores[i].value is not None:
                written[i] = [None if query is None else (query, *item[1:]) for query in queries_of(trace[0])]
        every = dict.fromkeys(item for queries in written.values() for item in queries if item is not None)
        more = [item for item in every if item not in known]
        if more:
            # What is left of the batch's time is shared, so that these queries never cost an answer its score.
            share = max(0.001, min(budget_s, (end - time.monotonic()) / len(more)))
            found = self._match.score_many(more, budget_s=share)
            known |= zip(more, (_whole(score, share, budget_s) for score in found), strict=True)
        for i, queries in written.items():
            scores[i] = _with_calls(scores[i], [None if item is None else known[item] for item in queries])
        return scores

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


def _whole(score: Score, share: float, budget_s: float) -> Score:
    """Return the score of a query, which is `invalid` if it had less time than an answer and ran past that."""
    if score.status == "timeout" and share < budget_s:
        return Score.invalid(f"{share:.2g} s were left for it, and it ran past them")
    return score


def _with_calls(score: Score, queries: Sequence[Score | None]) -> Score:
    """Return an answer's score with those of the queries that were written in the calls of its rollout."""
    failed = [str(query.details["reason"]) for query in queries if query is not None and query.value is None]
    details = dict(score.details)
    if failed:
        details["calls"] = f"{len(failed)} of {len(queries)} calls wrote a query that could not be judged: {failed[0]}"
    calls = [None if query is None else query.value for query in queries]
    if turn := turn_of(calls):
        details["turn"] = turn
    return attrs.evolve(score, details=details, calls=calls)


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
            sees_trace=True,
        ),
        RewardSpec(
            name="spider-exec-strict",
            summary="spider-exec without its weaknesses: order, DISTINCT, empty results, constants, copies.",
            config=StrictConfig,
            build=_strict,
            sees_trace=True,
        ),
    ]
