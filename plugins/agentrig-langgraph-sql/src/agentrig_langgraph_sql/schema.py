"""The schema of a database as text for the prompt, in one of three styles, up to a length.

Sample rows, if requested, follow their table in a comment, in the form of LangChain's `get_table_info()`.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import attrs

from agentrig_langgraph_sql.database import connect

STYLES = ("create", "compact", "spaced")
"""`create`: the `CREATE TABLE` statements as the database holds them. `compact`: `table(column,column)` a line.
`spaced`: `table name: column column` a line. There every name follows a space, as it does in a query, so that a
byte-level tokenizer gives it the same token in both."""

MAX_SAMPLE_ROWS = 3
_CELL = 100  # characters of a sample row's cell
_ESCAPES = str.maketrans({"\t": "\\t", "\n": "\\n", "\r": "\\r"})

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@attrs.frozen
class Table:
    """A table or view: its name, its columns' names, the statement that made it and some of a table's first rows."""

    name: str
    columns: Sequence[str]
    sql: str
    rows: Sequence[Sequence[Any]] = ()

    @property
    def compact(self) -> str:
        """The table as `name(column,column)`; names that need quotes have them."""
        return f"{quoted(self.name)}({','.join(map(quoted, self.columns))})"

    @property
    def spaced(self) -> str:
        """The table as `table name: column column`; names that need quotes have them."""
        return f"table {quoted(self.name)}: {' '.join(map(quoted, self.columns))}"

    def sample(self, n: int) -> str:
        """The first `n` rows as a comment, their cells split by tabs; empty for no rows."""
        if not n:
            return ""
        lines = [self.columns, *(map(_cell, row) for row in self.rows[:n])]
        text = "\n".join("\t".join(cells).replace("*/", "* /") for cells in lines)
        return f"\n/*\n{n} rows from {self.name} table:\n{text}\n*/"


def _cell(value: Any) -> str:
    if isinstance(value, bytes):
        return f"x'{value[: _CELL // 2].hex()}'"
    return "NULL" if value is None else str(value)[:_CELL].translate(_ESCAPES)


def quoted(name: str) -> str:
    """Return an identifier for SQL: unchanged if plain, else in double quotes."""
    return name if _PLAIN.fullmatch(name) else '"' + name.replace('"', '""') + '"'


def tables_of(connection: sqlite3.Connection, *, sample_rows: int = 0) -> list[Table]:
    """Return the tables and views in order of creation, without SQLite's own.

    No rows of a view are read, which may be an expensive query.
    """
    rows = connection.execute(
        "SELECT name, sql, type FROM sqlite_master"
        " WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' ORDER BY rowid"
    ).fetchall()
    columns = "SELECT name FROM pragma_table_info(?) ORDER BY cid"
    return [
        Table(
            name,
            [c for (c,) in connection.execute(columns, (name,))],
            (sql or "").strip(),
            _first_rows(connection, name, sample_rows) if kind == "table" and sample_rows else (),
        )
        for name, sql, kind in rows
    ]


def _first_rows(connection: sqlite3.Connection, name: str, n: int) -> Sequence[Sequence[Any]]:
    """Return a table's first rows; none if a value is longer than the connection allows."""
    mark = '"' + name.replace('"', '""') + '"'
    try:
        return connection.execute(f"SELECT * FROM {mark} LIMIT {n}").fetchall()
    except sqlite3.DataError as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_TOOBIG:
            return ()
        raise


def schema_text(
    database: str | os.PathLike[str], *, style: str = "create", limit: int = 2048, sample_rows: int = 0
) -> str:
    """Return a database's schema as text.

    It is cached as long as the file's time and size stay the same.

    Args:
        database: The SQLite file.
        style: One of `STYLES`.
        limit: Greatest length in characters. A schema that is longer loses detail table by table,
            never in the middle of a statement, and a comment in the text says so.
        sample_rows: Rows shown of each table, 0 to 3, as far as `limit` allows: first one of each table,
            then the second ones. A row is shown whole or not at all.

    Raises:
        FileNotFoundError: There is no such file.
        agentrig_langgraph_sql.database.DatabaseBroken: SQLite can't read it.
        ValueError: There is no such style, or more sample rows are asked for.
    """
    if not 0 <= sample_rows <= MAX_SAMPLE_ROWS:
        raise ValueError(f"sample_rows is {sample_rows}; it goes from 0 to {MAX_SAMPLE_ROWS}")
    if style not in STYLES:
        raise ValueError(f"schema style is {style!r}; use one of {', '.join(STYLES)}")
    path = Path(database).absolute()
    stat = path.stat()
    return _cached(str(path), stat.st_mtime_ns, stat.st_size, style, limit, sample_rows)


@lru_cache(maxsize=4096)
def _cached(path: str, _mtime_ns: int, _size: int, style: str, limit: int, sample_rows: int) -> str:
    with connect(path) as connection:
        tables = tables_of(connection, sample_rows=sample_rows)
    return render(tables, style=style, limit=limit)


def render(tables: Sequence[Table], *, style: str, limit: int) -> str:
    """Return the tables as text of at most `limit` characters; see `schema_text`."""
    pieces, gap = {
        "compact": ([table.compact for table in tables], "\n"),
        "spaced": ([table.spaced for table in tables], "\n"),
        "create": ([f"{table.sql.rstrip(';')};" for table in tables], "\n\n"),
    }[style]
    whole = gap.join(pieces)
    if len(whole) > limit:
        return _mixed(tables, pieces, limit) if style == "create" else _lines(pieces, limit)
    shown = _rows_that_fit(tables, limit - len(whole))
    return gap.join(piece + table.sample(n) for piece, table, n in zip(pieces, tables, shown, strict=True))


def _rows_that_fit(tables: Sequence[Table], left: int) -> list[int]:
    """Return how many sample rows of each table fit into `left` characters: one of each first, then a second."""
    shown = [0] * len(tables)
    for n in range(1, 1 + max((len(table.rows) for table in tables), default=0)):
        for index, table in enumerate(tables):
            if shown[index] == n - 1 and n <= len(table.rows):
                cost = len(table.sample(n)) - len(table.sample(n - 1))
                if cost <= left:
                    left -= cost
                    shown[index] = n
    return shown


def _mixed(tables: Sequence[Table], statements: Sequence[str], limit: int) -> str:
    """Give every table a compact line; then replace lines by whole statements, from the first table, while they fit."""
    note = "-- The schema is too long to show in full: these tables only by name and columns."
    lines = [f"-- {table.compact}" for table in tables]
    left = limit - len(note) - 1 - sum(len(line) + 1 for line in lines)
    if left < 0:
        return _lines([table.compact for table in tables], limit)
    shown: list[str] = []
    for index, statement in enumerate(statements):
        gain = len(statement) + 2 - (len(lines[index]) + 1)
        if gain <= left:
            left -= gain
            shown.append(statement)
            lines[index] = ""
    return "\n\n".join([*shown, "\n".join([note, *filter(None, lines)])])


def _lines(lines: Sequence[str], limit: int) -> str:
    """Return one line per table, as many as fit, then the number of tables left out."""
    whole = "\n".join(lines)
    if len(whole) <= limit:
        return whole
    kept: list[str] = []
    left = limit - len(f"-- {len(lines)} more tables left out")
    for line in lines:
        if (left := left - len(line) - 1) < 0:
            break
        kept.append(line)
    return "\n".join([*kept, f"-- {len(lines) - len(kept)} more tables left out"])
