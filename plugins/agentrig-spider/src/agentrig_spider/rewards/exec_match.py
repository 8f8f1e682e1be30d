"""`ExecMatch`: does a predicted query return what the gold query returns?"""

from __future__ import annotations

import os
import time
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal

from agentrig import Score
from agentrig_spider.rewards.golds import Gold, Golds, is_volatile
from agentrig_spider.rewards.matching import OutOfTime
from agentrig_spider.rewards.official import Official
from agentrig_spider.rewards.rules import Query, Refused, Rules, Unsound
from agentrig_spider.rewards.strict import Strict
from agentrig_spider.rewards.suite import copies_of, databases
from agentrig_spider.sandbox import (
    HEAP_BYTES,
    MAX_RESULT_BYTES,
    Fetched,
    Fingerprint,
    NeedsWorker,
    QueryFailed,
    QueryLimits,
    QueryTimeout,
    QueryTooLarge,
    WorkerDied,
    WorkersBusy,
    damage,
    fingerprint,
    run_query,
)

MAX_ROWS = 500_000
"""Most rows of a gold query."""

MAX_REASON = 1_000

THREADS = 4
"""Queries of one batch that are in worker processes at once."""


class ExecMatch:
    """Scores a predicted SQL query by what it returns; see `docs/exec-match.md`.

    Safe to call from many threads at once, and after a fork. No query can change a file, use more than the set
    amount of memory, exceed its time limit or make `score` raise.

    Args:
        mode: `official` gives the verdicts of Spider's official evaluator in its default settings;
            `strict` corrects its weaknesses.
        timeout_s: Wall seconds that one call of `score` may take.
        memory_mb: Memory limit of SQLite for one query in MiB; a prediction that needs more is wrong, a gold invalid.
        keep_distinct: Keep the word DISTINCT in mode `official`, as the official evaluator's option of
            that name does; then all statements count, not only the first. Mode `strict` always keeps it.
        copies: Mode `strict` only: the folder in which `agentrig data perturb` wrote perturbed copies; None
            for the folder `perturbed` beside each database.
    """

    def __init__(
        self,
        mode: Literal["official", "strict"] = "official",
        timeout_s: float = 10.0,
        *,
        memory_mb: float = HEAP_BYTES / 2**20,
        keep_distinct: bool = False,
        copies: str | os.PathLike[str] | None = None,
    ) -> None:
        if mode not in ("official", "strict"):
            raise ValueError(f"mode is {mode!r}; use 'official' or 'strict'")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s!r}; use seconds above 0")
        self.mode = mode
        if not memory_mb >= 8:
            raise ValueError(f"memory_mb is {memory_mb!r}; SQLite needs at least 8")
        self.timeout_s = timeout_s
        self.memory_mb = memory_mb
        self._keep_distinct = keep_distinct
        self._copies = copies
        self._rules: Rules = Strict() if mode == "strict" else Official(keep_distinct=keep_distinct)
        self._golds = Golds()
        self._limits = QueryLimits(heap_bytes=int(memory_mb * 2**20))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the cached golds; another process runs them itself."""
        more: Any = {"memory_mb": self.memory_mb, "keep_distinct": self._keep_distinct, "copies": self._copies}
        return partial(ExecMatch, self.mode, self.timeout_s, **more), ()

    def score(
        self, predicted: str, gold: str, database: str | os.PathLike[str], *, budget_s: float | None = None
    ) -> Score:
        """Score one prediction.

        Args:
            predicted: The agent's SQL.
            gold: The right SQL.
            database: The SQLite file. The other files of its folder whose names contain `.sqlite` are
                test databases too: the prediction must match on all.
            budget_s: A smaller time limit than `timeout_s`, for this call.

        Returns:
            `ok` with 1.0 or 0.0; `timeout` with 0.0 if the prediction exceeded its time limit; `invalid`
            if the database is missing or damaged or the gold query fails. `details["reason"]` says why, and
            `details["wrong"]` in one word: no-query, error, columns, rows, empty, order, values, tables.
        """
        budget = self.timeout_s if budget_s is None else min(self.timeout_s, budget_s)
        return self._guarded(predicted, gold, database, budget=budget, workers=True)

    def score_many(
        self, items: Sequence[tuple[str, str, str | os.PathLike[str]]], *, budget_s: float | None = None
    ) -> list[Score]:
        """Score a batch of (predicted, gold, database); equal items once, slow queries in parallel.

        Args:
            items: For each, the arguments of `score`.
            budget_s: A smaller time limit than `timeout_s`, for each item.
        """
        budget = self.timeout_s if budget_s is None else min(self.timeout_s, budget_s)
        # A prediction that is not text may not be hashable, so its position is the key.
        keys = [tuple(map(str, item)) if isinstance(item[0], str) else index for index, item in enumerate(items)]
        scores: dict[Hashable, Score] = {}
        slow: dict[Hashable, tuple[str, str, str | os.PathLike[str]]] = {}
        for key, item in zip(keys, items, strict=True):
            if key in scores or key in slow:
                continue
            try:
                scores[key] = self._guarded(*item, budget=budget, workers=False)
            except NeedsWorker:
                slow[key] = item
        if slow:
            with ThreadPoolExecutor(min(THREADS, len(slow)), thread_name_prefix="exec-match") as pool:
                judged = pool.map(lambda item: self._guarded(*item, budget=budget, workers=True), slow.values())
                scores.update(zip(slow, judged, strict=True))
        return [scores[key] for key in keys]

    def _guarded(
        self, predicted: str, gold: str, database: str | os.PathLike[str], *, budget: float, workers: bool
    ) -> Score:
        try:
            return self._score(predicted, gold, database, budget, workers)
        except WorkersBusy as error:
            return Score.invalid(f"the query was not judged within {budget:g} s: {error}")
        except Unsound as error:
            return Score.invalid(_plain(str(error)))
        except NeedsWorker:
            raise
        except Exception as error:  # an error of this reward must not count against the policy
            return Score.invalid(_plain(f"the reward failed: {type(error).__name__}: {error}"))

    def _score(
        self, predicted: str, gold: str, database: str | os.PathLike[str], budget: float, workers: bool
    ) -> Score:
        started = time.monotonic()
        deadline = started + budget
        if not isinstance(predicted, str):
            raise Unsound(f"the prediction is of type {type(predicted).__name__}; the agent must return SQL as str")
        query = self._rules.read_gold(gold)
        paths = databases(database)
        if self.mode == "strict":
            paths = [*paths, *copies_of(paths[0], self._copies)]
        suite = [(path, _mark(path)) for path in paths]
        golds = [self._gold(path, mark, query, deadline, workers) for path, mark in suite]
        for (path, _), result in zip(suite, golds, strict=True):
            if result.fetched is None:
                raise Unsound(f"the gold query fails on {Path(path).name}: {result.failure}")
        gold_s = time.monotonic() - started
        try:
            text = self._rules.read_prediction(predicted)
        except Refused as error:
            return _verdict(0.0, str(error), wrong="error" if predicted.strip() else "no-query")
        if text == query.text and not is_volatile(text):
            return _verdict(1.0, "the prediction is the gold query")
        for (path, mark), result in zip(suite, golds, strict=True):
            assert result.fetched is not None
            # One row more than the gold query's is enough to see a mismatch.
            max_rows = len(result.fetched.rows) + 1
            try:
                fetched = self._run(path, mark, text, max_rows, deadline, workers)
                difference = self._rules.difference(query, result, fetched, deadline)
            except (QueryTimeout, OutOfTime):
                if gold_s > budget / 2:
                    raise Unsound(f"the gold query took {gold_s:.2f} s of a budget of {budget:g} s") from None
                return Score.timeout(f"the prediction ran past its budget of {budget:g} s")
            except QueryTooLarge as error:
                return _verdict(0.0, str(error), wrong="error")
            except QueryFailed as error:
                if error.damaged and (problem := damage(path, mark, deadline)):
                    raise Unsound(problem) from None
                return _verdict(0.0, f"the prediction fails: {error}", wrong="error")
            if difference is not None:
                on = f" on {Path(path).name}" if len(suite) > 1 else ""
                return _verdict(0.0, difference.words + on, wrong=difference.kind)
        return _verdict(1.0, "the results match, by another query")

    def _run(self, path: str, mark: Fingerprint, sql: str, max_rows: int, deadline: float, workers: bool) -> Fetched:
        return run_query(path, mark, sql, max_rows=max_rows, deadline=deadline, limits=self._limits, workers=workers)

    def _gold(self, path: str, mark: Fingerprint, query: Query, deadline: float, workers: bool) -> Gold:
        def run(sql: str, max_rows: int) -> Fetched:
            return self._run(path, mark, sql, max_rows, deadline, workers)

        def make() -> Gold:
            budget = deadline - time.monotonic()
            try:
                gold = self._rules.run_gold(query, run, MAX_ROWS + 1)
            except QueryTimeout as error:
                return Gold(failure=str(error), timed_out_after_s=budget)
            except QueryFailed as error:
                return Gold(failure=str(error), passing=error.damaged or isinstance(error, WorkerDied))
            if gold.fetched is not None and len(gold.fetched.rows) > MAX_ROWS:
                return Gold(failure=f"it returns more than {MAX_ROWS} rows or {MAX_RESULT_BYTES} bytes")
            return gold

        if is_volatile(query.text):
            return make()
        return self._golds.get((path, mark, query.text), make, deadline=deadline)


def _mark(path: str) -> Fingerprint:
    try:
        return fingerprint(path)
    except OSError as error:
        raise Unsound(f"the database {path} can't be read: {error}") from None


def _verdict(value: float, reason: str, *, wrong: str = "") -> Score:
    executes = wrong not in ("error", "no-query")
    details = {"reason": _plain(reason), **({"wrong": wrong} if wrong else {})}
    return Score(status="ok", value=value, components={"executes": float(executes)}, details=details)


def _plain(reason: str) -> str:
    """Return a reason that every file format can hold; SQLite's messages quote the query, which may be any text."""
    return reason[:MAX_REASON].encode(errors="backslashreplace").decode()
