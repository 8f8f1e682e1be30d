"""One query on one SQLite file, read-only, inside this process, within limits.

A query that may need more than these limits (a function whose cost is not linear, recursion, long
values, many steps) raises `Escalate` and runs again in a worker process that can be killed.
"""

from __future__ import annotations

import os
import resource
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

import attrs

from agentrig_spider.sandbox.guard import PLAIN_FUNCTIONS, Guard, set_limits

Row = tuple[Any, ...]

STEPS_PER_CHECK = 25_000
"""SQLite virtual machine steps between two checks of the clock; about a millisecond."""

CHECKS = 16
"""Checks of the clock before a query goes to a worker: 400,000 steps can't use much memory."""

SLICE_S = 0.05
"""CPU seconds of the thread before a query goes to a worker."""

CELLS_A_FETCH = 4_096
"""Cells that are fetched between two checks of the size of a result; at most 8 MB."""

MAX_CELL_BYTES = 2_000
"""Longest string, blob or record that is handled in this process."""


class Escalate(Exception):
    """The query needs a worker process."""


class QueryFailed(Exception):
    """SQLite refused the query or failed in it.

    Attributes:
        damaged: Whether the error is about the file rather than the query.
        refused: What the query tried to do and is not allowed to, as text; empty if it failed for another reason.
    """

    def __init__(self, message: str, *, damaged: bool = False, refused: str = "") -> None:
        super().__init__(message)
        self.damaged = damaged
        self.refused = refused


@attrs.frozen
class Fetched:
    """The result of a query.

    Attributes:
        rows: At most as many as requested.
        names: The columns' names; empty for a statement that returns no rows.
        tables: Names of the tables that it reads, lower case.
        cut: Whether rows were left out because the result would have been too large.
    """

    rows: list[Row]
    names: tuple[str, ...]
    tables: frozenset[str]
    cut: bool = False

    @property
    def columns(self) -> int:
        """Number of columns; 0 for a statement without a result."""
        return len(self.names)


class Connection:
    """A read-only, immutable handle with an authorizer and a step limit."""

    def __init__(self, path: str) -> None:
        self._checks = 0
        self._slice_end = 0.0
        self._connection = open_read_only(path)
        self._guard = Guard(PLAIN_FUNCTIONS, recursion=False, virtual_tables=False)
        set_limits(self._connection, cell_bytes=MAX_CELL_BYTES, pattern_bytes=100)
        self._connection.set_authorizer(self._guard.decide)
        self._connection.set_progress_handler(self._check, STEPS_PER_CHECK)

    def _check(self) -> int:
        self._checks += 1
        return self._checks >= CHECKS or time.thread_time() > self._slice_end

    def run(self, sql: str, *, max_rows: int, max_bytes: int, select_only: bool = False) -> Fetched:
        """Run one statement; with `select_only`, refuse all but SELECT, also statements that only read.

        Raises:
            Escalate: It needs a worker process, for example because its result may be larger than `max_bytes`.
            QueryFailed: SQLite refused it or failed.
        """
        self._checks = 0
        self._slice_end = time.thread_time() + SLICE_S
        self._guard.reset(select_only=select_only)
        cursor = self._connection.cursor()
        try:
            cursor.execute(sql)
            names = tuple([column[0] for column in cursor.description or ()])
            if problem := self._guard.no_query(names):
                raise QueryFailed(problem)
            rows = _fetch(cursor, len(names), max_rows, max_bytes)
        except (Escalate, QueryFailed):
            raise
        except Exception as error:
            raise self._translated(error) from None
        finally:
            cursor.close()
            if self._connection.in_transaction:
                self._connection.rollback()
        return Fetched(rows, names, self._guard.tables)

    def _translated(self, error: Exception) -> Exception:
        if self._guard.escalate:
            return Escalate()
        code = getattr(error, "sqlite_errorcode", None)
        if isinstance(error, MemoryError) or code in (
            sqlite3.SQLITE_INTERRUPT,
            sqlite3.SQLITE_TOOBIG,
            sqlite3.SQLITE_NOMEM,
        ):
            return Escalate()
        message = str(error)
        # Both errors come from this process's own limits, not from SQLite's defaults.
        if "LIKE or GLOB pattern too complex" in message or message.startswith("Could not decode to UTF-8"):
            return Escalate()
        return QueryFailed(message, damaged=is_damage(code), refused=self._guard.refused)

    def close(self) -> None:
        """Close the handle."""
        self._connection.close()


def _fetch(cursor: sqlite3.Cursor, columns: int, max_rows: int, max_bytes: int) -> list[Row]:
    """Return the rows; raise `Escalate` if their texts could have more than `max_bytes` in total."""
    rows: list[Row] = []
    if not columns:
        return rows
    size = 0
    while len(rows) < max_rows:
        wanted = min(max_rows - len(rows), max(1, CELLS_A_FETCH // columns))
        some = cursor.fetchmany(wanted)
        rows += some
        if len(some) < wanted:
            break
        size += sum(len(cell) for row in some for cell in row if isinstance(cell, (str, bytes)))
        if size > max_bytes:
            raise Escalate
    return rows


def is_damage(code: int | None) -> bool:
    """Return whether an SQLite error code is about the file rather than the query."""
    return code is not None and code & 0xFF in (
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PERM,
    )


def read_only_uri(path: str) -> str:
    """Return a URI with which SQLite neither writes nor locks, and ignores side files."""
    return f"file:{quote(path)}?mode=ro&immutable=1"


def open_read_only(path: str) -> sqlite3.Connection:
    """Open a database by its `read_only_uri`."""
    connection = sqlite3.connect(
        read_only_uri(path), uri=True, isolation_level=None, check_same_thread=False, cached_statements=0, timeout=0
    )
    # Sorted and temporary rows stay in memory, bounded by the step limit; there is never a temporary file.
    connection.execute("PRAGMA temp_store = MEMORY")
    connection.execute("PRAGMA cache_size = -512")
    # Read the schema now: later the limits of queries would apply to it.
    connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
    return connection


class Fingerprint(NamedTuple):
    """Properties that change if a file is replaced or written: sizes in bytes, times in nanoseconds."""

    device: int
    inode: int
    size: int
    modified: int
    changed: int


def fingerprint(path: str) -> Fingerprint:
    """Return the fingerprint of a file.

    Raises:
        OSError: There is no such file.
    """
    stat = os.stat(path)
    return Fingerprint(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


class Pool:
    """Idle connections; a thread takes one, uses it exclusively and returns it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._idle: OrderedDict[tuple[str, Fingerprint], list[Connection]] = OrderedDict()
        self._count = 0

    def take(self, path: str, mark: Fingerprint) -> Connection:
        """Return a connection to this state of the file; open one if none is idle."""
        with self._lock:
            idle = self._idle.get((path, mark))
            if idle:
                self._count -= 1
                connection = idle.pop()
                if not idle:
                    del self._idle[path, mark]
                return connection
        return Connection(path)

    def give(self, path: str, mark: Fingerprint, connection: Connection) -> None:
        """Keep a connection for later use; if there are too many, close the one that was idle longest."""
        old: Sequence[Connection] = ()
        with self._lock:
            self._idle.setdefault((path, mark), []).append(connection)
            self._idle.move_to_end((path, mark))
            self._count += 1
            if self._count > self._size:
                _, old = self._idle.popitem(last=False)
                self._count -= len(old)
        for connection in old:
            connection.close()

    def forget(self) -> None:
        """Drop all connections without closing them: after a fork they belong to the parent."""
        self._lock = threading.Lock()
        self._idle = OrderedDict()
        self._count = 0


def _pool_size() -> int:
    """Return how many connections to keep; most of the process's file descriptors stay free for other uses."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 256 if soft == resource.RLIM_INFINITY else max(8, min(256, soft // 4))


POOL = Pool(_pool_size())
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=POOL.forget)
