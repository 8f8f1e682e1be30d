"""One query on one SQLite file, read-only, inside this process, within limits.

A query that may need more than this gives (a function whose cost is not linear, recursion, long
values, many steps) raises `Escalate` and is run again in a worker process that can be killed.
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
"""SQLite virtual machine steps between two looks at the clock; about a millisecond."""

CHECKS = 16
"""Looks at the clock before a query goes to a worker: 400,000 steps can't fill much memory."""

SLICE_S = 0.05
"""CPU seconds of the thread before a query goes to a worker."""

CELLS_A_FETCH = 4_096
"""Cells that are fetched between two looks at the size of a result; at most 8 MB."""

MAX_CELL_BYTES = 2_000
"""Longest string, blob or record that is handled in this process."""


class Escalate(Exception):
    """The query needs a worker process."""


class QueryFailed(Exception):
    """SQLite refused the query or failed in it.

    Attributes:
        damaged: Whether the error speaks of the file rather than of the query.
        refused: What the query asked for and may not do, in words; empty where it failed otherwise.
    """

    def __init__(self, message: str, *, damaged: bool = False, refused: str = "") -> None:
        super().__init__(message)
        self.damaged = damaged
        self.refused = refused


@attrs.frozen
class Fetched:
    """What a query returned.

    Attributes:
        rows: At most as many as asked for.
        names: The columns' names; empty for a statement that returns no rows.
        tables: Names of the tables that it reads, lower case.
        cut: Whether there were more rows, which would have made the result too large.
    """

    rows: list[Row]
    names: tuple[str, ...]
    tables: frozenset[str]
    cut: bool = False

    @property
    def columns(self) -> int:
        """Number of columns; 0 for a statement that returns none."""
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
        """Run one statement.

        Args:
            sql: The statement.
            max_rows: Where to stop.
            max_bytes: A result that may be larger is left to a worker process.
            select_only: Refuse what is no SELECT, also where it only tells.

        Raises:
            Escalate: It needs a worker process.
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
        # Both are wordings of this process's own limits, not of SQLite's defaults.
        if "LIKE or GLOB pattern too complex" in message or message.startswith("Could not decode to UTF-8"):
            return Escalate()
        return QueryFailed(message, damaged=is_damage(code), refused=self._guard.refused)

    def close(self) -> None:
        """Close the handle."""
        self._connection.close()


def _fetch(cursor: sqlite3.Cursor, columns: int, max_rows: int, max_bytes: int) -> list[Row]:
    """Return the rows; raise `Escalate` where their texts could be more than `max_bytes` together."""
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
    """Return whether an SQLite error code speaks of the file rather than of the query."""
    return code is not None and code & 0xFF in (
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PERM,
    )


def read_only_uri(path: str) -> str:
    """Return the address under which SQLite neither writes, nor locks, nor looks at side files."""
    return f"file:{quote(path)}?mode=ro&immutable=1"


def open_read_only(path: str) -> sqlite3.Connection:
    """Open a database by its `read_only_uri`."""
    connection = sqlite3.connect(
        read_only_uri(path), uri=True, isolation_level=None, check_same_thread=False, cached_statements=0, timeout=0
    )
    # Sorted and temporary rows stay in memory, where the step limit bounds them; never a temporary file.
    connection.execute("PRAGMA temp_store = MEMORY")
    connection.execute("PRAGMA cache_size = -512")
    # Reads the schema now: later it would have to keep within the limits that queries have.
    connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
    return connection


class Fingerprint(NamedTuple):
    """What changes when a file is replaced or written: sizes in bytes, times in nanoseconds."""

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
    """Idle connections, at most one user each; threads take one, use it alone and give it back."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._idle: OrderedDict[tuple[str, Fingerprint], list[Connection]] = OrderedDict()
        self._count = 0

    def take(self, path: str, mark: Fingerprint) -> Connection:
        """Return a connection to this state of the file; open one where none is idle."""
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
        """Keep a connection for the next user; the one idle longest makes room."""
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
        """Drop all without closing: after a fork they belong to the parent."""
        self._lock = threading.Lock()
        self._idle = OrderedDict()
        self._count = 0


def _pool_size() -> int:
    """Leave most of the process's file descriptors to others."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 256 if soft == resource.RLIM_INFINITY else max(8, min(256, soft // 4))


POOL = Pool(_pool_size())
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=POOL.forget)
