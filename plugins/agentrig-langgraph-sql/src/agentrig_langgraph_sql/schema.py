"""What the model is told of a database: its schema as text, in one of three forms, within a length."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import attrs

from agentrig_langgraph_sql.database import connect

STYLES = ("create", "compact", "spaced")
"""`create`: the `CREATE TABLE` statements as the database holds them. `compact`: `table(column,column)` a line.
`spaced`: `table name: column column` a line. There every name follows a space, as it does in a query, so that a
byte-level tokenizer gives it the same token in both."""

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@attrs.frozen
class Table:
    """A table or view: its name, its columns' names and the statement that made it."""

    name: str
    columns: Sequence[str]
    sql: str

    @property
    def compact(self) -> str:
        """The table as `name(column,column)`; names that need quotes have them."""
        return f"{quoted(self.name)}({','.join(map(quoted, self.columns))})"

    @property
    def spaced(self) -> str:
        """The table as `table name: column column`; names that need quotes have them."""
        return f"table {quoted(self.name)}: {' '.join(map(quoted, self.columns))}"


def quoted(name: str) -> str:
    """Return an identifier as SQL wants it: as it is when plain, else in double quotes."""
    return name if _PLAIN.fullmatch(name) else '"' + name.replace('"', '""') + '"'


def tables_of(connection: sqlite3.Connection) -> list[Table]:
    """Return the tables and views in the order in which they were made, SQLite's own left out."""
    rows = connection.execute(
        "SELECT name, sql FROM sqlite_master"
        " WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' ORDER BY rowid"
    ).fetchall()
    columns = "SELECT name FROM pragma_table_info(?) ORDER BY cid"
    return [
        Table(name, [c for (c,) in connection.execute(columns, (name,))], (sql or "").strip()) for name, sql in rows
    ]


def schema_text(database: str | os.PathLike[str], *, style: str = "create", limit: int = 2048) -> str:
    """Return a database's schema as text.

    It is kept in memory for as long as the file's time and size stay the same.

    Args:
        database: The SQLite file.
        style: One of `STYLES`.
        limit: Greatest length in characters. A schema that is longer loses detail table by table,
            never in the middle of a statement, and a comment in the text says so.

    Raises:
        FileNotFoundError: There is no such file.
        agentrig_langgraph_sql.database.DatabaseBroken: SQLite can't read it.
        ValueError: There is no such style.
    """
    if style not in STYLES:
        raise ValueError(f"schema style is {style!r}; use one of {', '.join(STYLES)}")
    path = Path(database).absolute()
    stat = path.stat()
    return _cached(str(path), stat.st_mtime_ns, stat.st_size, style, limit)


@lru_cache(maxsize=4096)
def _cached(path: str, _mtime_ns: int, _size: int, style: str, limit: int) -> str:
    with connect(path) as connection:
        tables = tables_of(connection)
    return render(tables, style=style, limit=limit)


def render(tables: Sequence[Table], *, style: str, limit: int) -> str:
    """Return the tables as text of at most `limit` characters; see `schema_text`."""
    if style == "compact":
        return _lines([table.compact for table in tables], limit)
    if style == "spaced":
        return _lines([table.spaced for table in tables], limit)
    statements = [f"{table.sql.rstrip(';')};" for table in tables]
    whole = "\n\n".join(statements)
    return whole if len(whole) <= limit else _mixed(tables, statements, limit)


def _mixed(tables: Sequence[Table], statements: Sequence[str], limit: int) -> str:
    """Give every table a compact line, then whole statements instead to as many as fit, first come first served."""
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
    """Return one line a table, as many as fit, then the number of those left out."""
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
