"""A read-only handle on an SQLite file, with budgets of time, rows and characters.

Why not langchain-community's SQL tools: they open the file for writing through SQLAlchemy, put no
limit on a query's time or rows, reflect the whole schema for every object made, and turn a broken
database into the same text as a wrong query. Here a query can't write, can't hang, can't fill the
memory, and what the query did wrong (text for the model) is kept apart from what the environment
did wrong (an exception).
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import attrs

_READS = frozenset((sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE))
# Codes that say nothing of the query: the file is missing, damaged, locked, or the machine is at its limits.
_ENVIRONMENT = frozenset(
    getattr(sqlite3, f"SQLITE_{name}")
    for name in ("PERM", "BUSY", "LOCKED", "NOMEM", "IOERR", "CORRUPT", "FULL", "CANTOPEN", "NOTADB")
)
_LONGEST_VALUE = 16 * 2**20  # bytes; SQLite's own limit of 1e9 lets `zeroblob` eat the memory
_OPCODES_A_CHECK = 10_000  # well below a millisecond of SQLite's work


class DatabaseBroken(Exception):
    """The database can't be read: the environment's fault, not the query's."""


@attrs.frozen(kw_only=True)
class Result:
    """What running a query gave.

    Attributes:
        columns: The names of the result's columns.
        rows: The first rows, as many as were asked for.
        more: There were more rows than the budget lets through.
        error: What was wrong with the query, or None.
    """

    columns: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = ()
    more: bool = False
    error: str | None = None

    def text(self, limit: int = 2048, *, header: bool = True) -> str:
        """Return the result for the model to read: a row a line, cells split by ` | `.

        Args:
            limit: Greatest length in characters; a longer text is cut after a whole row where one fits, and says so.
            header: Start with the columns' names.
        """
        if self.error is not None:
            return cut(f"Error: {self.error}", limit)
        head = [_line(self.columns, limit)] if header else []
        if not self.rows:
            return cut("\n".join([*head, "(no rows)"]), limit)
        lines, length = list(head), sum(map(len, head))
        for row in self.rows:
            lines.append(_line(row, limit))
            length += 1 + len(lines[-1])
            if length > limit + 1:  # the rest can't be shown, so it needs no form
                break
        whole = "\n".join(lines)
        if len(lines) == len(head) + len(self.rows) and not self.more and len(whole) <= limit:
            return whole
        total = f"more than {len(self.rows)}" if self.more else str(len(self.rows))
        left = limit - len(f"... (cut off: {len(self.rows)} of {total} rows shown)")
        kept = 0
        while kept < len(lines) and (left := left - len(lines[kept]) - 1) >= 0:
            kept += 1
        rows = max(0, kept - len(head))
        note = f"... (cut off: {rows} of {total} rows shown)"
        # Where not even one row fits, the beginning of it is better than nothing.
        return "\n".join([*lines[:kept], note]) if rows else cut(whole, limit, note)


def cut(text: str, limit: int, note: str = "... (cut off)") -> str:
    """Return the beginning of a text, with a note on a line of its own where something is missing."""
    return text if len(text) <= limit else f"{text[: max(0, limit - len(note) - 1)]}\n{note}"[-limit:]


def _line(cells: Sequence[Any], limit: int) -> str:
    return " | ".join(_cell(cell, limit) for cell in cells)


def _cell(value: Any, limit: int) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        return f"x'{value[: limit + 1].hex()}'"
    return str(value)[: limit + 1].replace("\r", "\\r").replace("\n", "\\n")


@contextmanager
def connect(path: str | Path, *, wait_s: float = 5.0) -> Iterator[sqlite3.Connection]:
    """Open an SQLite file that nothing done through the connection can change, and close it at the end.

    Args:
        path: The file.
        wait_s: How long to wait for a writer elsewhere to let go of the file.

    Raises:
        DatabaseBroken: SQLite can't open or read the file.
    """
    uri = f"{Path(path).absolute().as_uri()}?mode=ro"
    try:
        connection = sqlite3.connect(uri, uri=True, timeout=wait_s, isolation_level=None, check_same_thread=False)
    except sqlite3.OperationalError as error:
        raise DatabaseBroken(f"{path}: {error}") from error
    with closing(connection):
        # Real data holds bytes that are no UTF-8 in text columns.
        connection.text_factory = lambda raw: raw.decode(errors="replace")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
        try:
            yield connection
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _ENVIRONMENT:
                raise DatabaseBroken(f"{path}: {error}") from error
            raise


def run_query(
    database: str | Path, query: str, *, timeout_s: float = 5.0, max_rows: int = 1000, max_chars: int = 1_000_000
) -> Result:
    """Run one query that reads.

    Args:
        database: The SQLite file.
        query: One statement. One that would write, change settings or attach files is refused.
        timeout_s: The query is stopped after so many seconds.
        max_rows: So many rows are fetched at most.
        max_chars: No more rows are fetched once their values have so many characters together.

    Returns:
        Rows, or the query's error in words for the model.

    Raises:
        DatabaseBroken: The environment failed, whatever the query says.
    """
    if not query.strip():
        return Result(error="the query is empty")
    deadline = time.monotonic() + timeout_s
    refused: list[int] = []

    def authorize(action: int, _one: str | None, name: str | None, _three: str | None, _four: str | None) -> int:
        if action in _READS and not (action == sqlite3.SQLITE_FUNCTION and name == "load_extension"):
            return sqlite3.SQLITE_OK
        refused.append(action)
        return sqlite3.SQLITE_DENY

    with connect(database, wait_s=timeout_s) as connection:
        connection.set_authorizer(authorize)
        connection.set_progress_handler(lambda: time.monotonic() > deadline, _OPCODES_A_CHECK)
        try:
            cursor = connection.execute(query)
            if cursor.description is None:
                return Result(error="the statement returns no rows; write a SELECT")
            rows, more = _fetch(cursor, max_rows, max_chars)
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:  # ValueError: null characters, lone surrogates
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _ENVIRONMENT:
                raise
            return Result(error=_in_words(error, refused, timeout_s))
        columns = [column[0] for column in cursor.description]
    return Result(columns=columns, rows=rows, more=more)


def _fetch(cursor: sqlite3.Cursor, max_rows: int, max_chars: int) -> tuple[list[Sequence[Any]], bool]:
    """Return the rows within the budgets, and whether there were more."""
    rows: list[Sequence[Any]] = []
    for row in cursor:
        if len(rows) >= max_rows or max_chars <= 0:
            return rows, True
        rows.append(row)
        max_chars -= sum(len(cell) for cell in row if isinstance(cell, (str, bytes)))
    return rows, False


def _in_words(error: Exception, refused: Sequence[int], timeout_s: float) -> str:
    if refused:
        return "only a SELECT that reads the tables is allowed"
    if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_INTERRUPT:
        return f"the query was stopped after {timeout_s:g} s"
    return str(error)
