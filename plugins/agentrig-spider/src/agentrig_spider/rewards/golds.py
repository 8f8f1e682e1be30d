"""A cache of the results of gold queries, by database fingerprint and query."""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import attrs

from agentrig_spider.sandbox import Fetched, Row

_CLOCK = re.compile(r"""\bnow\b|\b(?:date|time|datetime|julianday|unixepoch)\s*\(\s*\)|\bstrftime\s*\([^,()]*\)""")
_CHANGING = ("random", "current_date", "current_time", "changes(", "last_insert_rowid")


def is_volatile(sql: str) -> bool:
    """Return whether a query may return another result the next time, on the same data."""
    lowered = sql.lower()
    if any(word in lowered for word in _CHANGING):
        return True
    # The regular expression is slow; most queries have no word that could match it.
    maybe = "now" in lowered or "strftime" in lowered or "()" in lowered.replace(" ", "")
    return maybe and _CLOCK.search(lowered) is not None


@attrs.frozen(kw_only=True)
class Ties:
    """The rows that a sorted gold could have returned.

    Attributes:
        rows: All sorted rows, without LIMIT.
        groups: For each row a number; rows with equal sort keys have the same number.
        offset: How many of them it skips.
    """

    rows: Sequence[Row]
    groups: Sequence[int]
    offset: int


@attrs.frozen
class Gold:
    """A gold query's result, or why it has none.

    Attributes:
        fetched: Its rows; None when it failed.
        failure: Why it failed; empty when it ran.
        ties: Mode `strict` only: which rows may come in any order; None if the order does not matter.
        passing: Whether a new attempt may succeed (the file or the machine failed, not the query).
        timed_out_after_s: The time limit that it exceeded, or None.
    """

    fetched: Fetched | None = None
    failure: str = ""
    ties: Ties | None = None
    passing: bool = False
    timed_out_after_s: float | None = None


_ALL: weakref.WeakSet[Golds] = weakref.WeakSet()


class Golds:
    """A thread-safe cache of golds; the least recently used are removed first."""

    def __init__(self, max_entries: int = 20_000, max_cells: int = 1_000_000) -> None:
        self._max_entries = max_entries
        self._max_cells = max_cells
        self._kept: OrderedDict[Hashable, tuple[Gold, int]] = OrderedDict()
        self._cells = 0
        self._reset()
        _ALL.add(self)

    def _reset(self) -> None:
        """Forget the threads, also those of the process that this one was forked from; keep the golds."""
        self._lock = threading.Lock()
        self._running: dict[Hashable, threading.Lock] = {}

    def get(self, key: Hashable, make: Callable[[], Gold], *, deadline: float) -> Gold:
        """Return the gold under `key`; it is computed once, even if several threads request it at once."""
        while True:
            with self._lock:
                kept = self._kept.get(key)
                if kept is not None:
                    gold = kept[0]
                    spent = gold.timed_out_after_s
                    if spent is None or spent >= deadline - time.monotonic():
                        self._kept.move_to_end(key)
                        return gold
                    self._remove(key)
                running = self._running.get(key)
                if running is None:
                    done = self._running[key] = threading.Lock()
                    done.acquire()
                    break
            if running.acquire(timeout=max(0.0, deadline - time.monotonic())):
                running.release()
            else:
                return Gold(failure="another thread runs the gold query and it takes longer than the budget")
        try:
            gold = make()
            self._keep(key, gold)
            return gold
        finally:
            with self._lock:
                del self._running[key]
            done.release()

    def _keep(self, key: Hashable, gold: Gold) -> None:
        cells = 1 if gold.fetched is None else 1 + len(gold.fetched.rows) * gold.fetched.columns
        if gold.ties is not None and gold.fetched is not None:
            cells += len(gold.ties.rows) * (1 + gold.fetched.columns)
        if gold.passing or cells > self._max_cells // 2:
            return
        with self._lock:
            self._kept[key] = (gold, cells)
            self._cells += cells
            while self._kept and (len(self._kept) > self._max_entries or self._cells > self._max_cells):
                self._remove(next(iter(self._kept)))

    def _remove(self, key: Hashable) -> None:
        _, cells = self._kept.pop(key)
        self._cells -= cells


def _after_fork() -> None:
    for golds in list(_ALL):
        golds._reset()


os.register_at_fork(after_in_child=_after_fork)
