"""Databases' schemas with the words of their names: as the agent shows them, and as questions speak of them."""

from __future__ import annotations

import json
import random
import re
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import attrs
from agentrig_langgraph_sql.prompts import SHORT
from agentrig_langgraph_sql.schema import Table as Shown
from agentrig_langgraph_sql.schema import render, tables_of

SCHEMA_LIMIT = 2048
"""`table_info_truncate` of the run, in characters."""

Place = tuple[str, str]
"""A table's and a column's name."""


@attrs.frozen
class Column:
    """A column: its name, how people call it, Spider's type for it and some of its values."""

    name: str
    words: str
    type: str = "text"
    values: tuple[str | int | float, ...] = ()


@attrs.frozen
class Table:
    """A table: its name, how people call it, its columns and the columns of its primary key."""

    name: str
    words: str
    columns: tuple[Column, ...]
    primary: frozenset[str] = frozenset()

    def column(self, name: str) -> Column:
        """Return the column of a name."""
        return next(c for c in self.columns if c.name == name)


@attrs.frozen
class Schema:
    """A database's tables and its declared foreign keys: (child table, column), (parent table, column)."""

    db_id: str
    tables: tuple[Table, ...]
    foreign_keys: tuple[tuple[Place, Place], ...] = ()

    def text(self) -> str:
        """Return what the model is shown of the schema."""
        shown = [Shown(t.name, [c.name for c in t.columns], "") for t in self.tables]
        return render(shown, style=SHORT.schema_style, limit=SCHEMA_LIMIT)

    def table(self, name: str) -> Table:
        """Return the table of a name."""
        return next(t for t in self.tables if t.name == name)

    def names(self) -> set[str]:
        """Return the names of all tables and columns."""
        return {t.name for t in self.tables} | {c.name for t in self.tables for c in t.columns}


def words_of(name: str) -> str:
    """Return a name as words: split at underscores and capitals, in small letters."""
    parts = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).replace("_", " ")
    return " ".join(parts.lower().split())


def read_schemas(spider: Path, db_ids: Iterable[str], *, values: int = 24) -> dict[str, Schema]:
    """Return the schemas of databases, with words from `tables.json` where it has them.

    Args:
        spider: Spider's folder.
        db_ids: Which databases; no other is opened.
        values: So many different values of each column are kept at most.
    """
    described = {d["db_id"]: d for d in json.loads((spider / "tables.json").read_text("utf-8"))}
    return {
        db_id: _schema(db_id, spider / "database" / db_id / f"{db_id}.sqlite", described.get(db_id), values)
        for db_id in sorted(db_ids)
    }


def _schema(db_id: str, path: Path, described: Mapping[str, list] | None, values: int) -> Schema:
    words, types, keys = _descriptions(described)
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
    connection.text_factory = lambda raw: raw.decode(errors="replace")
    tables = []
    for shown in tables_of(connection):
        low = shown.name.lower()
        info = connection.execute("SELECT name, pk, type FROM pragma_table_info(?)", (shown.name,)).fetchall()
        columns = [
            Column(
                name,
                words.get((low, name.lower())) or words_of(name),
                types.get((low, name.lower())) or ("number" if re.search("INT|REAL|NUM", kind.upper()) else "text"),
                _values(connection, shown.name, name, values),
            )
            for name, _, kind in info
        ]
        primary = frozenset(name for name, pk, _ in info if pk)
        tables.append(Table(shown.name, words.get((low, "")) or words_of(shown.name), tuple(columns), primary))
    connection.close()
    spelled = {(t.name.lower(), c.name.lower()): (t.name, c.name) for t in tables for c in t.columns}
    pairs = [(spelled[a], spelled[b]) for a, b in keys if a in spelled and b in spelled and a[0] != b[0]]
    return Schema(db_id, tuple(tables), tuple(pairs))


def _descriptions(
    described: Mapping[str, list] | None,
) -> tuple[dict[Place, str], dict[Place, str], list[tuple[Place, Place]]]:
    """Return words, types and foreign keys of `tables.json` by names in small letters; a table's own name under ""."""
    if described is None:
        return {}, {}, []
    tables = [name.lower() for name in described["table_names_original"]]
    words = {(name, ""): text.lower() for name, text in zip(tables, described["table_names"], strict=True)}
    types = {}
    places = []
    for (table, name), (_, text), kind in zip(
        described["column_names_original"], described["column_names"], described["column_types"], strict=True
    ):
        place = (tables[table] if table >= 0 else "", name.lower())
        places.append(place)
        words[place], types[place] = text.lower(), kind
    return words, types, [(places[a], places[b]) for a, b in described["foreign_keys"]]


def _values(connection: sqlite3.Connection, table: str, column: str, limit: int) -> tuple[str | int | float, ...]:
    def quoted(name: str) -> str:
        return '"' + name.replace('"', '""') + '"'

    # The first rows are enough, and large tables need not be read.
    query = f"SELECT DISTINCT {quoted(column)} FROM (SELECT {quoted(column)} FROM {quoted(table)} LIMIT 500) LIMIT ?"
    found = [v for (v,) in connection.execute(query, (limit,)) if isinstance(v, str | int | float)]
    plain = re.compile(r"[\w .,:@/&+-]{1,32}")
    return tuple(
        v for v in found if not isinstance(v, str) or (plain.fullmatch(v) and v.strip() == v and " ," not in v)
    )


def shuffled(schema: Schema, rng: random.Random) -> Schema:
    """Return the schema with tables and columns in another order; keys mostly stay first, as people write them."""
    tables = []
    for table in rng.sample(schema.tables, len(schema.tables)):
        columns = rng.sample(table.columns, len(table.columns))
        if rng.random() < 0.6:
            columns.sort(key=lambda c: c.name not in table.primary)
        tables.append(attrs.evolve(table, columns=tuple(columns)))
    return attrs.evolve(schema, tables=tuple(tables))


def thinned(schema: Schema, rng: random.Random, *, keep: int) -> Schema:
    """Return the schema with at most `keep` tables, neighbours by foreign keys first."""
    if len(schema.tables) <= keep:
        return schema
    chosen = {rng.choice(schema.tables).name}
    while len(chosen) < keep:
        near = [
            (b[0] if a[0] in chosen else a[0]) for a, b in schema.foreign_keys if (a[0] in chosen) != (b[0] in chosen)
        ]
        rest = [t.name for t in schema.tables if t.name not in chosen]
        chosen.add(rng.choice(near or rest))
    keys = [k for k in schema.foreign_keys if k[0][0] in chosen and k[1][0] in chosen]
    return Schema(schema.db_id, tuple(t for t in schema.tables if t.name in chosen), tuple(keys))


def value_pool(schemas: Sequence[Schema]) -> list[str]:
    """Return text values of all the databases that are words."""
    found = {v for s in schemas for t in s.tables for c in t.columns for v in c.values if isinstance(v, str)}
    return sorted(v for v in found if re.fullmatch(r"[^\W\d_]+([ .&-]+[^\W\d_]+)*", v))
