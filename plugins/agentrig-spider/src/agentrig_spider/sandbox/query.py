"""Runs one query on one database: in this process if that is safe, else in a worker."""

from __future__ import annotations

import re
import time
from typing import Literal

import attrs

from agentrig_spider.sandbox import connection
from agentrig_spider.sandbox.connection import POOL, Escalate, Fetched, Fingerprint, QueryFailed
from agentrig_spider.sandbox.pool import WORKERS, WorkerLost, WorkerTimeout

HEAP_BYTES = 64 << 20
"""Memory limit of SQLite for one query, unless the caller sets another."""

MAX_RESULT_BYTES = 16 << 20
"""Largest result, counted as 16 bytes per row and per cell, plus the length of texts and blobs."""

MAX_FILE_BYTES = 64 << 20
"""Largest database that is read inside this process: counting a table's rows is one step that can't be interrupted."""

_LONG_LITERAL = re.compile(r"'[^']{200}|\"[^\"]{200}")


class QueryTimeout(Exception):
    """The query exceeded its time limit."""


class QueryTooLarge(QueryFailed):
    """The query needs more memory than it may use."""


@attrs.frozen(kw_only=True)
class QueryLimits:
    """The limits of a query, except its time and its rows.

    Attributes:
        heap_bytes: Memory limit of SQLite in a worker process; Python's rows may use as much again.
        max_bytes: Largest result.
        cut: A larger result is cut there; without `cut` the query fails.
        select_only: Refuse everything except SELECT, also PRAGMA, BEGIN and similar.
        undecodable: Error handling for text that is not UTF-8, as in `bytes.decode`.
    """

    heap_bytes: int = HEAP_BYTES
    max_bytes: int = MAX_RESULT_BYTES
    cut: bool = False
    select_only: bool = False
    undecodable: Literal["ignore", "replace"] = "ignore"


_DEFAULT_LIMITS = QueryLimits()


class WorkerDied(QueryTooLarge):
    """The worker process died while it ran the query."""


class NeedsWorker(Exception):
    """The query needs a worker process, and the caller does not allow one."""


def looks_plain(sql: str) -> bool:
    """Return whether compiling the query, and each of its steps, is certainly cheap.

    Long literals make quadratic functions slow; a chain of common table expressions, each using the
    one before it several times, is expanded exponentially before SQLite checks the clock.
    """
    if len(sql) > 4_000 or sql.count("||") > 4 or sql.count("(") > 100:
        return False
    if len(sql) > 200 and ("'" in sql or '"' in sql) and _LONG_LITERAL.search(sql):
        return False
    lowered = sql.lower()
    if "pragma" in lowered:  # integrity_check reads the whole file in one step
        return False
    selects = lowered.count("select")
    if "with" in lowered:
        return selects <= 6 and lowered.count(",") + lowered.count("join") <= 30
    return selects <= 16


def run_query(
    path: str,
    mark: Fingerprint,
    sql: str,
    *,
    max_rows: int,
    deadline: float,
    limits: QueryLimits = _DEFAULT_LIMITS,
    workers: bool = True,
) -> Fetched:
    """Run one statement and fetch at most `max_rows` rows.

    Args:
        path: The database file, absolute.
        mark: Its fingerprint; a pooled connection of another state of the file is not used.
        sql: One statement.
        max_rows: Most rows to fetch.
        deadline: `time.monotonic()` at which to end the query; waiting for a worker process counts.
        limits: Its other limits.
        workers: Whether a worker process may be used.

    Raises:
        QueryFailed: SQLite refused the query or failed in it.
        QueryTooLarge: It needs too much memory.
        QueryTimeout: The deadline passed.
        WorkersBusy: The deadline passed because the machine or other queries took the time.
        NeedsWorker: Only with `workers=False`.
        OSError: No worker process can be started.
    """
    if mark.size <= MAX_FILE_BYTES and looks_plain(sql):
        try:
            return _run_here(path, mark, sql, max_rows, limits)
        except Escalate:
            pass
    if not workers:
        raise NeedsWorker
    return _run_in_worker(path, sql, max_rows, deadline, limits)


def damage(path: str, mark: Fingerprint, deadline: float) -> str:
    """Return what is wrong with a database, as text; empty if it is intact.

    Call it after an error that is about the file, because a query can provoke such errors; `mark` is its fingerprint
    when the query began.

    Raises:
        WorkersBusy: The machine had no time for the check before the deadline, a time of `time.monotonic()`.
    """
    try:
        if connection.fingerprint(path) != mark:
            return f"the database {path} changed while it was in use"
    except OSError as error:
        return f"the database {path} can't be read: {error}"
    try:
        found = run_query(path, mark, "PRAGMA quick_check(1)", max_rows=1, deadline=deadline).rows
    except (QueryFailed, QueryTimeout) as error:
        return f"the database {path} is damaged: {error}"
    return "" if found == [("ok",)] else f"the database {path} is damaged: {found[0][0] if found else 'unknown'}"


def _run_here(path: str, mark: Fingerprint, sql: str, max_rows: int, limits: QueryLimits) -> Fetched:
    try:
        handle = POOL.take(path, mark)
    except Exception as error:
        raise QueryFailed(str(error), damaged=True) from None
    try:
        fetched = handle.run(sql, max_rows=max_rows, max_bytes=limits.max_bytes, select_only=limits.select_only)
    except (Escalate, QueryFailed):
        POOL.give(path, mark, handle)
        raise
    except BaseException:
        handle.close()
        raise
    POOL.give(path, mark, handle)
    return fetched


def _run_in_worker(path: str, sql: str, max_rows: int, deadline: float, limits: QueryLimits) -> Fetched:
    if time.monotonic() >= deadline:
        raise QueryTimeout("the query ran past its budget")
    request = (
        connection.read_only_uri(path),
        sql,
        max_rows,
        limits.max_bytes,
        limits.heap_bytes,
        limits.cut,
        limits.select_only,
        limits.undecodable,
    )
    try:
        reply = WORKERS.run(request, deadline=deadline)
    except WorkerTimeout:
        raise QueryTimeout("the query ran past its budget") from None
    except WorkerLost:
        if time.monotonic() >= deadline:
            raise QueryTimeout("the query ran past its budget") from None
        raise WorkerDied("the query ended its worker process: too much memory, or SQLite crashed") from None
    kind, *content = reply
    if kind == "rows":
        rows, names, tables, cut = content
        return Fetched(rows, names, frozenset(tables), cut)
    message, code, refused = content
    if kind == "timeout":
        raise QueryTimeout(message)
    if kind == "memory":
        raise QueryTooLarge(message)
    raise QueryFailed(message, damaged=connection.is_damage(code), refused=refused)
