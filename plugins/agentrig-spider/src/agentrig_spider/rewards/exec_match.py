"""`ExecMatch`: does a predicted query return what the gold query returns?"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from agentrig import Score
from agentrig_spider.rewards.execution import (
    MAX_RESULT_BYTES,
    MAX_ROWS,
    QueryTimeout,
    QueryTooLarge,
    run_query,
)
from agentrig_spider.rewards.golds import Gold, Golds, is_volatile
from agentrig_spider.rewards.lexing import TooLong, official_text, order_matters
from agentrig_spider.rewards.matching import OutOfTime, same_result
from agentrig_spider.rewards.sqlite import Fingerprint, QueryFailed, fingerprint


class Unsound(Exception):
    """The data or the machine failed, not the prediction; the message says what."""


class ExecMatch:
    """Scores a predicted SQL query by what it returns; see `docs/exec-match.md`.

    Safe to call from many threads at once, and after a fork. Nothing that a query says changes a file,
    takes more than a set amount of memory, outlives its budget or makes `score` raise.

    Args:
        mode: `official` gives the verdicts of Spider's official evaluator in its default settings;
            `strict` closes its holes.
        timeout_s: Wall seconds that one call of `score` may take.
    """

    def __init__(self, mode: Literal["official", "strict"] = "official", timeout_s: float = 10.0) -> None:
        if mode != "official":
            raise ValueError(f"mode is {mode!r}; use 'official'")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s!r}; use seconds above 0")
        self.mode = mode
        self.timeout_s = timeout_s
        self._golds = Golds()

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
            `ok` with 1.0 or 0.0; `timeout` with 0.0 where the prediction ran past its budget; `invalid`
            where the database is missing or damaged or the gold query fails. `details["reason"]` says why.
        """
        budget = self.timeout_s if budget_s is None else min(self.timeout_s, budget_s)
        try:
            return self._score(predicted, gold, database, budget, workers=True)
        except Unsound as error:
            return Score.invalid(str(error))
        except Exception as error:  # a fault of this reward must not look like the policy's
            return Score.invalid(f"the reward failed: {type(error).__name__}: {error}")

    def _score(
        self, predicted: str, gold: str, database: str | os.PathLike[str], budget: float, *, workers: bool
    ) -> Score:
        started = time.monotonic()
        deadline = started + budget
        if not isinstance(predicted, str):
            raise Unsound(f"the prediction is no text but {type(predicted).__name__}; the agent must return SQL as str")
        try:
            gold_text = official_text(gold)
        except TooLong as error:
            raise Unsound(f"the gold query: {error}") from None
        if gold_text is None:
            raise Unsound("the gold query is empty")
        suite = [(path, _mark(path)) for path in databases(database)]
        golds = [self._gold(path, mark, gold_text, deadline, workers) for path, mark in suite]
        for (path, _), result in zip(suite, golds, strict=True):
            if result.fetched is None:
                raise Unsound(f"the gold query fails on {Path(path).name}: {result.failure}")
        try:
            text = official_text(predicted)
        except TooLong as error:
            return _verdict(0.0, str(error), executes=False)
        if text is None:
            return _verdict(0.0, "the prediction is empty", executes=False)
        if text == gold_text and not is_volatile(text):
            return _verdict(1.0, "the prediction is the gold query")
        ordered = order_matters(gold_text)
        gold_s = time.monotonic() - started
        for (path, mark), result in zip(suite, golds, strict=True):
            assert result.fetched is not None
            wanted = result.fetched.rows
            try:
                fetched = run_query(path, mark, text, max_rows=len(wanted) + 1, deadline=deadline, workers=workers)
                same = same_result(wanted, fetched.rows, ordered=ordered, deadline=deadline)
            except (QueryTimeout, OutOfTime):
                if gold_s > budget / 2:
                    raise Unsound(f"the gold query took {gold_s:.2f} s of a budget of {budget:g} s") from None
                return Score.timeout(f"the prediction ran past its budget of {budget:g} s")
            except QueryTooLarge as error:
                return _verdict(0.0, str(error), executes=False)
            except QueryFailed as error:
                if error.damaged:
                    _check_sound(path, mark, deadline)
                return _verdict(0.0, f"the prediction fails: {error}", executes=False)
            if not same:
                return _verdict(0.0, "the results differ")
        return _verdict(1.0, "the results match")

    def _gold(self, path: str, mark: Fingerprint, sql: str, deadline: float, workers: bool) -> Gold:
        def make() -> Gold:
            budget = deadline - time.monotonic()
            try:
                fetched = run_query(path, mark, sql, max_rows=MAX_ROWS + 1, deadline=deadline, workers=workers)
            except QueryTimeout as error:
                return Gold(failure=str(error), timed_out_after_s=budget)
            except QueryFailed as error:
                return Gold(failure=str(error))
            if len(fetched.rows) > MAX_ROWS:
                return Gold(failure=f"it returns more than {MAX_ROWS} rows or {MAX_RESULT_BYTES} bytes")
            return Gold(fetched=fetched)

        if is_volatile(sql):
            return make()
        return self._golds.get((path, mark, sql), make, deadline=deadline)


_FOLDERS: dict[str, tuple[int, list[str]]] = {}
_SETTLED_NS = 100_000_000


def databases(database: str | os.PathLike[str]) -> Sequence[str]:
    """Return the test databases: the file itself, then the others of its folder that contain `.sqlite`.

    Raises:
        Unsound: There is no such file.
    """
    path = os.path.abspath(os.fspath(database))
    folder, name = os.path.split(path)
    try:
        changed = os.stat(folder).st_mtime_ns
        known = _FOLDERS.get(folder)
        if known is not None and known[0] == changed:
            names = known[1]
        else:
            names = sorted(other for other in os.listdir(folder) if ".sqlite" in other)
            # A folder's time has a granularity: one that changed just now may change again within it.
            if time.time_ns() - changed > _SETTLED_NS:
                if len(_FOLDERS) > 10_000:
                    _FOLDERS.clear()
                _FOLDERS[folder] = (changed, names)
    except OSError as error:
        raise Unsound(f"the database {path} can't be read: {error}") from None
    return [path, *(os.path.join(folder, other) for other in names if other != name)]


def _mark(path: str) -> Fingerprint:
    try:
        return fingerprint(path)
    except OSError as error:
        raise Unsound(f"the database {path} can't be read: {error}") from None


def _check_sound(path: str, mark: Fingerprint, deadline: float) -> None:
    """Raise `Unsound` where the file was changed under the query, or is damaged."""
    if _mark(path) != mark:
        raise Unsound(f"the database {path} changed while it was in use")
    try:
        found = run_query(path, mark, "PRAGMA quick_check(1)", max_rows=1, deadline=deadline).rows
    except (QueryFailed, QueryTimeout) as error:
        raise Unsound(f"the database {path} is damaged: {error}") from None
    if found != [("ok",)]:
        raise Unsound(f"the database {path} is damaged: {found[0][0] if found else 'unknown'}")


def _verdict(value: float, reason: str, *, executes: bool = True) -> Score:
    return Score(status="ok", value=value, components={"executes": float(executes)}, details={"reason": reason})
