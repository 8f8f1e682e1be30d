"""The agent's SQL tool: one query on an SQLite file, read-only, with budgets of time, memory, rows and characters.

It runs in `agentrig_spider.sandbox`, like the rewards' queries: a query can't write, can't hang, and can't fill the
memory or a disk. An error of the query is text for the model; an error of the environment is an exception.
docs/decisions/0005 says why this is not LangChain's `SQLDatabase`.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import attrs
from agentrig_spider import sandbox
from agentrig_spider.sandbox import Fingerprint, QueryFailed, QueryLimits, QueryTimeout, WorkersBusy

_LONGEST_VALUE = 16 * 2**20  # bytes; for the agent's own reads: the schema and sample rows
_JOURNAL = bytes.fromhex("d9d505f920a163d7")  # the first bytes of a journal that SQLite would roll back


class DatabaseBroken(Exception):
    """The database can't be read: the environment's fault, not the query's."""


@attrs.frozen(kw_only=True)
class Result:
    """The result of a query.

    Attributes:
        columns: The names of the result's columns.
        rows: The first rows, at most as many as requested.
        more: There were more rows than the budget allows.
        error: What was wrong with the query, or None.
    """

    columns: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = ()
    more: bool = False
    error: str | None = None

    def text(self, limit: int = 2048, *, header: bool = True) -> str:
        """Return the result as text for the model: one row per line, cells separated by ` | `.

        A text of more than `limit` characters is cut after a whole row if possible, with a note.
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
            if length > limit + 1:  # the rest can't be shown, so it is not formatted
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
        # If not even one row fits, return its beginning.
        return "\n".join([*lines[:kept], note]) if rows else cut(whole, limit, note)


def cut(text: str, limit: int, note: str = "... (cut off)") -> str:
    """Return the beginning of a text, with a note on a separate line if something is missing."""
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
def connect(path: str | Path) -> Iterator[sqlite3.Connection]:
    """Open an SQLite file so that the connection can't change it, and close it at the end.

    Use it only for the agent's own statements, which are known to end; for a model's queries use `run_query`.

    Raises:
        DatabaseBroken: SQLite can't open or read the file, or it is being written to.
    """
    absolute = os.path.abspath(path)
    _at_rest(absolute)
    try:
        connection = sandbox.open_read_only(absolute)
        with closing(connection):
            # Text columns of real data may have bytes that are not UTF-8.
            connection.text_factory = lambda raw: raw.decode(errors="replace")
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
            yield connection
    except sqlite3.DatabaseError as error:
        if sandbox.is_damage(getattr(error, "sqlite_errorcode", None)):
            raise DatabaseBroken(f"{path}: {error}") from error
        raise


def _at_rest(path: str) -> Fingerprint:
    """Return the file's fingerprint; raise `DatabaseBroken` if the file is not complete.

    It is read from the disk without a lock, so unfinished changes of a writer would be missed.
    """
    try:
        mark = sandbox.fingerprint(path)
    except OSError as error:
        raise DatabaseBroken(f"{path}: unable to open the database file ({error.strerror})") from None
    for side in ("-wal", "-journal"):
        try:
            with open(path + side, "rb") as file:
                start = file.read(len(_JOURNAL))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise DatabaseBroken(f"{path}{side}: {error.strerror}; let this user read it, or remove it") from None
        if start and (side == "-wal" or start == _JOURNAL):
            raise DatabaseBroken(
                f"{path} has changes that are not finished, in {os.path.basename(path)}{side}: close the programs that"
                f" write to it, then let SQLite finish them: sqlite3 {path} 'PRAGMA wal_checkpoint(TRUNCATE)'"
            )
    return mark


def run_query(
    database: str | Path, query: str, *, timeout_s: float = 5.0, max_rows: int = 1000, max_chars: int = 1_000_000
) -> Result:
    """Run one query that reads.

    Args:
        database: The SQLite file.
        query: One statement. One that would write, change settings or attach files is refused.
        timeout_s: The query is stopped after this many wall seconds.
        max_rows: Most rows to fetch.
        max_chars: No more rows are fetched once their values have this many characters in total.

    Returns:
        Rows, or the query's error as text for the model.

    Raises:
        DatabaseBroken: The environment failed, not the query.
    """
    if not query.strip():
        return Result(error="the query is empty")
    path = os.path.abspath(database)
    mark = _at_rest(path)
    deadline = time.monotonic() + timeout_s
    limits = QueryLimits(
        max_bytes=min(max_chars, sandbox.MAX_RESULT_BYTES), cut=True, select_only=True, undecodable="replace"
    )
    try:
        fetched = sandbox.run_query(path, mark, query, max_rows=max_rows + 1, deadline=deadline, limits=limits)
    except QueryTimeout:
        return Result(error=f"the query was stopped after {timeout_s:g} s")
    except QueryFailed as error:
        # A query can provoke errors that are about the file; then the file itself is checked.
        if error.damaged and (problem := sandbox.damage(path, mark, time.monotonic() + timeout_s)):
            raise DatabaseBroken(problem) from error
        return Result(error="only a SELECT that reads the tables is allowed" if error.refused else str(error))
    except (WorkersBusy, OSError) as error:
        raise DatabaseBroken(f"{path}: the query did not run: {error}") from error
    rows = _within(fetched.rows, max_rows, max_chars)
    return Result(columns=list(fetched.names), rows=rows, more=fetched.cut or len(rows) < len(fetched.rows))


def _within(fetched: Sequence[Sequence[Any]], max_rows: int, max_chars: int) -> list[Sequence[Any]]:
    """Return the first rows, as many as the budgets allow."""
    rows: list[Sequence[Any]] = []
    for row in fetched[:max_rows]:
        if max_chars <= 0:
            break
        rows.append(row)
        max_chars -= sum(len(cell) for cell in row if isinstance(cell, (str, bytes)))
    return rows
