"""The databases of `mini-sql`: seeded rows in SQLite files; the same seed gives the same bytes."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Sequence
from pathlib import Path

from agentrig_spider.tasks.domains import Domain, Number, Table

Row = tuple[str | int, ...]
_VERSION_FIELD = slice(96, 100)  # of the header: the SQLite library that wrote the file last


def columns(domain: Domain, table: Table) -> list[tuple[str, str]]:
    """Return the table's columns in order, each with its SQL type."""
    key = [(domain.key, "INTEGER")]
    own = [(table.label, "TEXT")]
    own += [(column.name, "TEXT") for column in table.categories]
    own += [(column.name, "INTEGER") for column in table.numbers]
    return key + own if table is domain.parent else own + key


def rows_of(domain: Domain, rng: random.Random) -> tuple[list[Row], list[Row]]:
    """Return the rows of parent and child, in the order of `columns`.

    Labels and numbers are all different within a table; the values of a category, and the children
    of a parent, are spread unevenly, so one is clearly the most common.
    """
    parents = [(i + 1, *row) for i, row in enumerate(_own_rows(domain.parent, rng))]
    weights = [1 + 6 * rng.random() ** 3 for _ in parents]
    owners = rng.choices(range(1, len(parents) + 1), weights, k=domain.child.rows)
    children = [(*row, owner) for row, owner in zip(_own_rows(domain.child, rng), owners, strict=True)]
    return parents, children


def _own_rows(table: Table, rng: random.Random) -> list[Row]:
    values: list[Sequence[str | int]] = [rng.sample(list(table.labels), table.rows)]
    values += [_uneven(category.values, table.rows, rng) for category in table.categories]
    values += [_distinct(number, table.rows, rng) for number in table.numbers]
    return list(zip(*values, strict=True))


def _uneven(values: Sequence[str], n: int, rng: random.Random) -> list[str]:
    return rng.choices(values, [1 + 2 * rng.random() for _ in values], k=n)


def _distinct(number: Number, n: int, rng: random.Random) -> list[int]:
    return rng.sample(range(number.low, number.high + 1), n)


def write_database(path: Path, domain: Domain, rows: tuple[list[Row], list[Row]]) -> None:
    """Write a domain's tables as a new SQLite file.

    Everything is in one transaction, so the header's change counter is always 1. The version of the
    SQLite library in the header, which nothing reads, is cleared.
    """
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("PRAGMA page_size = 4096")
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("BEGIN")
        for table, content in zip((domain.parent, domain.child), rows, strict=True):
            connection.execute(create_statement(domain, table))
            marks = ", ".join("?" * len(content[0]))
            connection.executemany(f"INSERT INTO {table.name} VALUES ({marks})", content)
        connection.execute("COMMIT")
    finally:
        connection.close()
    data = bytearray(path.read_bytes())
    data[_VERSION_FIELD] = bytes(4)
    path.write_bytes(data)


def create_statement(domain: Domain, table: Table) -> str:
    """Return the table's `CREATE TABLE` statement."""
    lines = []
    for name, kind in columns(domain, table):
        if name != domain.key:
            lines.append(f"{name} {kind}")
        elif table is domain.parent:
            lines.append(f"{name} {kind} PRIMARY KEY")
        else:
            lines.append(f"{name} {kind} REFERENCES {domain.parent.name} ({name})")
    return f"CREATE TABLE {table.name} ({', '.join(lines)})"
