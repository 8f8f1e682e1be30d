"""Runs one query on one database, in this process where that is safe, else in a worker."""

from __future__ import annotations

import re
import time

from agentrig_spider.rewards import sqlite
from agentrig_spider.rewards.sandbox import WORKERS, WorkerLost, WorkerTimeout
from agentrig_spider.rewards.sqlite import POOL, Escalate, Fetched, Fingerprint, QueryFailed

HEAP_BYTES = 64 << 20
"""What SQLite may allocate for one query, unless the caller sets more."""

MAX_RESULT_BYTES = 16 << 20
"""Largest result, counted as 16 bytes a row and a cell and the length of texts and blobs."""

MAX_ROWS = 500_000
"""Most rows of a gold query."""

MAX_FILE_BYTES = 64 << 20
"""Largest database that is read inside this process: counting a table's rows is one uninterruptible step."""

_LONG_LITERAL = re.compile(r"'[^']{200}|\"[^\"]{200}")


class QueryTimeout(Exception):
    """The query ran past its budget."""


class QueryTooLarge(QueryFailed):
    """The query needs more memory than it may have."""


class WorkerDied(QueryTooLarge):
    """The worker process died under the query."""


class NeedsWorker(Exception):
    """The query needs a worker process and the caller asked not to start one."""


def looks_plain(sql: str) -> bool:
    """Return whether compiling the query and each of its steps is sure to be cheap.

    Long literals make quadratic functions slow; a chain of common table expressions, each using the
    one before it several times, is expanded exponentially before SQLite looks at the clock.
    """
    if len(sql) > 4_000 or sql.count("||") > 4 or sql.count("(") > 100:
        return False
    if len(sql) > 200 and ("'" in sql or '"' in sql) and _LONG_LITERAL.search(sql):
        return False
    lowered = sql.lower()
    if "pragma" in lowered:  # integrity_check walks the whole file in one step
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
    heap_bytes: int = HEAP_BYTES,
    workers: bool = True,
) -> Fetched:
    """Run one statement and fetch at most `max_rows` rows.

    Args:
        path: The database file, absolute.
        mark: Its fingerprint; a pooled connection of another state of the file is not used.
        sql: One statement.
        max_rows: Where to stop.
        deadline: `time.monotonic()` at which to end the query.
        heap_bytes: What SQLite may allocate in a worker process; Python's rows may take as much again.
        workers: Whether a worker process may be used.

    Raises:
        QueryFailed: SQLite refused the query or failed in it.
        QueryTooLarge: It needs too much memory.
        QueryTimeout: The deadline passed.
        NeedsWorker: Only with `workers=False`.
        OSError: No worker process can be started.
    """
    if mark.size <= MAX_FILE_BYTES and looks_plain(sql):
        try:
            return _run_here(path, mark, sql, max_rows)
        except Escalate:
            pass
    if not workers:
        raise NeedsWorker
    return _run_in_worker(path, sql, max_rows, deadline, heap_bytes)


def _run_here(path: str, mark: Fingerprint, sql: str, max_rows: int) -> Fetched:
    try:
        connection = POOL.take(path, mark)
    except Exception as error:
        raise QueryFailed(str(error), damaged=True) from None
    try:
        fetched = connection.run(sql, max_rows=max_rows)
    except (Escalate, QueryFailed):
        POOL.give(path, mark, connection)
        raise
    except BaseException:
        connection.close()
        raise
    POOL.give(path, mark, connection)
    return fetched


def _run_in_worker(path: str, sql: str, max_rows: int, deadline: float, heap_bytes: int) -> Fetched:
    if time.monotonic() >= deadline:
        raise QueryTimeout("the query ran past its budget")
    try:
        reply = WORKERS.run(
            sqlite.read_only_uri(path),
            sql,
            max_rows=max_rows,
            max_bytes=MAX_RESULT_BYTES,
            heap_bytes=heap_bytes,
            deadline=deadline,
        )
    except WorkerTimeout:
        raise QueryTimeout("the query ran past its budget") from None
    except WorkerLost:
        if time.monotonic() >= deadline:
            raise QueryTimeout("the query ran past its budget") from None
        raise WorkerDied("the query ended its worker process: too much memory, or SQLite crashed") from None
    kind = reply[0]
    if kind == "rows":
        return Fetched(reply[1], reply[2], frozenset(reply[3]))
    if kind == "timeout":
        raise QueryTimeout(reply[1])
    if kind == "memory":
        raise QueryTooLarge(reply[1])
    raise QueryFailed(reply[1], damaged=sqlite.is_damage(reply[2]))
