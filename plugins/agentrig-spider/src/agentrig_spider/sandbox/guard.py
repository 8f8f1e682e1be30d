"""What a query may do: read tables and call functions, nothing else."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


PLAIN_FUNCTIONS = _words(
    """abs avg ceil ceiling coalesce count cume_dist current_date current_time current_timestamp date datetime
    dense_rank first_value floor ifnull iif julianday lag last_insert_rowid last_value lead length like likelihood
    likely lower max min mod nth_value ntile nullif percent_rank pow power rank round row_number sign
    sqrt strftime substr substring sum time total trunc typeof unicode unlikely upper"""
)
"""Functions with time and result linear in short arguments: safe to run inside the process."""

FORBIDDEN_FUNCTIONS = frozenset({"load_extension", "fts3_tokenizer", "readfile", "writefile", "edit", "fsdir"})
"""Functions that access something outside the database."""

_LOOKING_PRAGMAS = _words(
    "foreign_key_list foreign_key_check index_info index_list index_xinfo integrity_check quick_check table_info "
    "table_list table_xinfo"
)
"""Pragmas whose argument selects what to read."""

_ACTING_PRAGMAS = _words("incremental_vacuum optimize shrink_memory wal_checkpoint")
"""Pragmas that change something without an argument; all others then only read."""


# Looked up several times per query, each time after SQLite has returned Python's lock.
_READ, _SELECT, _OK = sqlite3.SQLITE_READ, sqlite3.SQLITE_SELECT, sqlite3.SQLITE_OK


class Guard:
    """The authorizer of one connection.

    Attributes:
        escalate: Whether a worker process would allow what was last refused.
        refused: What was last refused, as text; empty if nothing was.
    """

    def __init__(
        self, functions: Collection[str] | None, *, recursion: bool, virtual_tables: bool, select_only: bool = False
    ) -> None:
        self._functions = functions
        self._recursion = recursion
        self._virtual_tables = virtual_tables
        self.reset(select_only=select_only)

    @property
    def tables(self) -> frozenset[str]:
        """Tables read since `reset`, lower case."""
        return frozenset([name.lower() for name in self._read if name])

    def reset(self, *, select_only: bool = False) -> None:
        """Clear the state of the last query; with `select_only` the next may use no PRAGMA or transaction either."""
        self.escalate = False
        self.refused = ""
        self._read: set[str | None] = set()
        self._select_only = select_only
        self._without_rows = False

    def no_query(self, names: Collection[str]) -> str:
        """Return an error for a statement that ran but was not a query; empty if it was a query.

        SQLite does not call the authorizer for a statement that has nothing to do (`REINDEX` without an index,
        `DROP TABLE IF EXISTS` without the table). Its columns show what it was: a query has columns. Of the allowed
        statements only a PRAGMA, a transaction and a savepoint have none.
        """
        return "" if names or self._without_rows else "the statement returns no rows; write a SELECT"

    def decide(
        self, action: int, first: str | None, second: str | None, database: str | None, trigger: str | None
    ) -> int:
        """Allow or refuse one action; the callback for `sqlite3.Connection.set_authorizer`."""
        if action == _READ:
            self._read.add(first)
            return _OK
        if action == _SELECT:
            return _OK
        if action == sqlite3.SQLITE_FUNCTION:
            name = (second or "").lower()
            if name in FORBIDDEN_FUNCTIONS:
                self.refused = f"the function {name}"
                return sqlite3.SQLITE_DENY
            if self._functions is None or name in self._functions:
                return sqlite3.SQLITE_OK
            self.escalate = True
            return sqlite3.SQLITE_DENY
        if action == sqlite3.SQLITE_RECURSIVE:
            self.escalate = not self._recursion
            return sqlite3.SQLITE_OK if self._recursion else sqlite3.SQLITE_DENY
        if action == sqlite3.SQLITE_UPDATE and first == "sqlite_master":
            # This is how a table-valued function (json_each) is declared. A real update of the schema
            # fails on a read-only file anyway.
            self.escalate = not self._virtual_tables
            return sqlite3.SQLITE_OK if self._virtual_tables else sqlite3.SQLITE_DENY
        if action == sqlite3.SQLITE_PRAGMA:
            name = (first or "").lower()
            looks = name in _LOOKING_PRAGMAS or (second is None and name not in _ACTING_PRAGMAS)
            if looks and not self._select_only:
                self._without_rows = True
                return sqlite3.SQLITE_OK
            self.refused = f"PRAGMA {name}"
            return sqlite3.SQLITE_DENY
        if action in (sqlite3.SQLITE_TRANSACTION, sqlite3.SQLITE_SAVEPOINT) and not self._select_only:
            self._without_rows = True
            # Without writes a transaction is a no-op; it is rolled back after the statement.
            return sqlite3.SQLITE_OK
        self.refused = "a statement that is more than a query"
        return sqlite3.SQLITE_DENY


def set_limits(connection: sqlite3.Connection, *, cell_bytes: int, pattern_bytes: int) -> None:
    """Limit the cost of one value (text, blob or record) and of one native call (a LIKE or GLOB pattern)."""
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, cell_bytes)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, pattern_bytes)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    connection.setlimit(sqlite3.SQLITE_LIMIT_WORKER_THREADS, 0)
