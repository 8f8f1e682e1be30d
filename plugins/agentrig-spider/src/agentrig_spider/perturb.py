"""Perturbed copies of databases: other rows under the same schema, so queries that match by chance fail.

A correct query is correct on every database of its schema. A query that returns the right rows by
chance (another table with as many rows, a filter that happens to keep the same rows) is rarely
correct when rows and values change. Keys and constraints hold in the copies.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import attrs
import click

from agentrig import AgentrigError

REPLACED = 0.4
"""Share of a column's cells that get another value of the same column (or, for numbers, of its range)."""

REMOVED, ADDED = 0.25, 0.25
"""Largest shares of a table's rows that are removed and added; the actual shares are sampled for each table."""

MAX_CHANGED_ROWS = 5_000
"""Most rows of a table that are changed, and fifty times the number of rows removed."""


@attrs.frozen(kw_only=True)
class Table:
    """The parts of a table that may change.

    Attributes:
        name: Its name.
        columns: All columns that can be written.
        free: Columns that belong to no key; any row may have any value of the column.
        references: Single columns that point to another table: their values may be exchanged between rows.
        serial: The column of an INTEGER PRIMARY KEY, or None.
        growing: Whether rows can be added: every unique key is the serial one, which points to no other table.
        parents: (child table, child columns, own columns) of the foreign keys that point here.
    """

    name: str
    columns: Sequence[str]
    free: Sequence[str]
    references: Sequence[str]
    serial: str | None
    growing: bool
    parents: Sequence[tuple[str, Sequence[str], Sequence[str]]]


def perturb(source: str | os.PathLike[str], target: str | os.PathLike[str], *, seed: int) -> dict[str, int]:
    """Write a perturbed copy of a database.

    Args:
        source: The SQLite file; it is only read.
        target: The copy; its folder is created if needed, and an older file is replaced.
        seed: The same source and seed give the same copy.

    Returns:
        How many rows were `removed` and `added` and how many cells `replaced`.

    Raises:
        AgentrigError: The source is not an intact SQLite database.
    """
    source, target = Path(source).resolve(), Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    part.unlink(missing_ok=True)
    try:
        with (
            contextlib.closing(sqlite3.connect(f"file:{quote(str(source))}?mode=ro&immutable=1", uri=True)) as original,
            contextlib.closing(sqlite3.connect(part, isolation_level=None)) as copy,
        ):
            original.backup(copy)
            copy.text_factory = _text
            dangling = _dangling(copy)
            done = _change(copy, random.Random(f"{source.stem}:{seed}"))
            if not _dangling(copy) <= dangling:
                raise AgentrigError(f"perturbing {source} broke a foreign key; please report this database")
            copy.execute("VACUUM")
        part.replace(target)
    except sqlite3.Error as error:
        raise AgentrigError(f"{source} can't be perturbed: {error}. Is it an intact SQLite database?") from None
    finally:
        part.unlink(missing_ok=True)
    return done


def _text(data: bytes) -> str | bytes:
    """Decode UTF-8; return other text as bytes instead of failing."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _dangling(connection: sqlite3.Connection) -> set[tuple[Any, ...]]:
    """Return (table, columns, values) of the foreign keys that point to nothing; Spider's own data has some."""
    found: set[tuple[Any, ...]] = set()
    for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
        for parent, own, parent_columns in list(_foreign_keys(connection, table)):
            mine, theirs = ", ".join(map(_name, own)), ", ".join(map(_name, parent_columns))
            query = f"SELECT {mine} FROM {_name(table)} EXCEPT SELECT {theirs} FROM {_name(parent)}"
            with contextlib.suppress(sqlite3.OperationalError):  # the parent does not exist
                found.update((table, mine, row) for row in connection.execute(query) if None not in row)
    return found


def _change(connection: sqlite3.Connection, dice: random.Random) -> dict[str, int]:
    triggers = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
    done = {"removed": 0, "added": 0, "replaced": 0}
    connection.execute("PRAGMA foreign_keys = OFF")
    connection.execute("BEGIN")
    for name, _ in triggers:  # they would run at every change
        connection.execute(f"DROP TRIGGER {_name(name)}")
    for table in list(_tables(connection)):
        done["removed"] += _remove(connection, table, dice)
        done["added"] += _add(connection, table, dice)
        done["replaced"] += _replace(connection, table, dice)
    for _, sql in triggers:
        connection.execute(sql)
    connection.execute("COMMIT")
    return done


def _tables(connection: sqlite3.Connection) -> Iterator[Table]:
    """Yield the ordinary tables that have a rowid."""
    rows = connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
        " AND sql NOT LIKE 'create virtual%' ORDER BY name"
    ).fetchall()
    keys: dict[str, list[tuple[str, list[str], list[str]]]] = {}
    for (name,) in rows:
        for parent, child_columns, parent_columns in _foreign_keys(connection, name):
            keys.setdefault(parent.lower(), []).append((name, child_columns, parent_columns))
    for (name,) in rows:
        try:
            connection.execute(f"SELECT rowid FROM {_name(name)} LIMIT 0")
        except sqlite3.OperationalError:
            continue  # WITHOUT ROWID
        info = [row for row in connection.execute(f"PRAGMA table_xinfo({_name(name)})") if row[6] == 0]
        columns = [row[1] for row in info]
        primary = [row[1] for row in info if row[5]]
        serial = primary[0] if len(primary) == 1 and _is_serial(info, primary[0]) else None
        unique = [
            [row[2] for row in connection.execute(f"PRAGMA index_info({_name(index[1])})")]
            for index in connection.execute(f"PRAGMA index_list({_name(name)})").fetchall()
            if index[2]
        ]
        keyed = {column for key in unique for column in key} | set(primary)
        pointing = [own for _, own, _ in _foreign_keys(connection, name)]
        single = {own[0] for own in pointing if len(own) == 1}
        outgoing = {column for own in pointing for column in own}
        incoming = {column for _, _, own in keys.get(name.lower(), []) for column in own}
        lowered = {column.lower() for column in keyed | outgoing | incoming}
        yield Table(
            name=name,
            columns=columns,
            free=[column for column in columns if column.lower() not in lowered],
            references=sorted(single - keyed - incoming),
            serial=serial,
            growing=(
                all(key == [serial] for key in unique)
                and (serial is not None or not primary)
                and (serial is None or serial.lower() not in {column.lower() for column in outgoing})
            ),
            parents=keys.get(name.lower(), []),
        )


def _is_serial(info: Sequence[Any], column: str) -> bool:
    return any(row[1] == column and str(row[2]).upper() == "INTEGER" for row in info)


def _foreign_keys(connection: sqlite3.Connection, table: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield (parent table, own columns, parent columns) of a table's foreign keys."""
    grouped: dict[int, list[Any]] = {}
    for row in connection.execute(f"PRAGMA foreign_key_list({_name(table)})").fetchall():
        grouped.setdefault(row[0], []).append(row)
    for rows in grouped.values():
        rows.sort(key=lambda row: row[1])
        parent = rows[0][2]
        parent_columns = [row[4] for row in rows]
        if any(column is None for column in parent_columns):  # REFERENCES parent, without columns: its primary key
            info = connection.execute(f"PRAGMA table_info({_name(parent)})").fetchall()
            parent_columns = [row[1] for row in sorted(info, key=lambda row: row[5]) if row[5]]
        own = [row[3] for row in rows]
        if len(parent_columns) == len(own):
            yield parent, own, parent_columns


def _rowids(connection: sqlite3.Connection, table: Table) -> list[int]:
    return [row[0] for row in connection.execute(f"SELECT rowid FROM {_name(table.name)} ORDER BY rowid")]


def _remove(connection: sqlite3.Connection, table: Table, dice: random.Random) -> int:
    """Remove some rows that no other row points to, but keep at least two."""
    rowids = _rowids(connection, table)
    most = min(len(rowids) - 2, round(len(rowids) * REMOVED), MAX_CHANGED_ROWS // 50)
    if most < 1:
        return 0
    used = ""
    for child, child_columns, own in table.parents:
        same = " AND ".join(
            f"child.{_name(theirs)} = {_name(table.name)}.{_name(ours)}"
            for theirs, ours in zip(child_columns, own, strict=True)
        )
        used += f" AND NOT EXISTS (SELECT 1 FROM {_name(child)} AS child WHERE {same})"
    removed = 0
    for rowid in dice.sample(rowids, dice.randint(1, most)):
        try:
            cursor = connection.execute(f"DELETE FROM {_name(table.name)} WHERE rowid = ?{used}", (rowid,))
        except sqlite3.OperationalError:
            return removed  # a foreign key names a column that does not exist
        removed += cursor.rowcount
    return removed


def _add(connection: sqlite3.Connection, table: Table, dice: random.Random) -> int:
    """Add rows with values of other rows, and with a new serial key if there is one."""
    rowids = _rowids(connection, table)
    most = min(round(len(rowids) * ADDED), MAX_CHANGED_ROWS // 50)
    if not table.growing or most < 1:
        return 0
    names = ", ".join(map(_name, table.columns))
    marks = ", ".join("?" * len(table.columns))
    added = 0
    for rowid in dice.sample(rowids, dice.randint(1, most)):
        values = connection.execute(f"SELECT {names} FROM {_name(table.name)} WHERE rowid = ?", (rowid,)).fetchone()
        new = [None if column == table.serial else value for column, value in zip(table.columns, values, strict=True)]
        try:
            connection.execute(f"INSERT INTO {_name(table.name)} ({names}) VALUES ({marks})", new)
        except sqlite3.IntegrityError:
            continue
        added += 1
    return added


def _replace(connection: sqlite3.Connection, table: Table, dice: random.Random) -> int:
    """Give cells outside keys another value of their column; numbers also other values in its range."""
    rowids = _rowids(connection, table)
    if len(rowids) < 2:
        return 0
    chosen = rowids if len(rowids) <= MAX_CHANGED_ROWS else dice.sample(rowids, MAX_CHANGED_ROWS)
    replaced = 0
    for column in (*table.free, *table.references):
        values = [
            row[0] for row in connection.execute(f"SELECT {_name(column)} FROM {_name(table.name)} ORDER BY rowid")
        ]
        whole = [value for value in values if type(value) is int]
        spread = column in table.free and len(whole) == len(values) and len(set(whole)) > 5
        for rowid in chosen:
            if dice.random() >= REPLACED:
                continue
            value = dice.randint(min(whole), max(whole)) if spread and dice.random() < 0.5 else dice.choice(values)
            try:
                connection.execute(
                    f"UPDATE {_name(table.name)} SET {_name(column)} = ? WHERE rowid = ?", (value, rowid)
                )
            except sqlite3.IntegrityError:
                continue  # a CHECK that also looks at other columns
            replaced += 1
    return replaced


def find_databases(places: Sequence[Path]) -> list[Path]:
    """Return the SQLite files named by files and folders; copies made earlier are left out."""
    found: list[Path] = []
    for place in places:
        if place.is_dir():
            inside = sorted(path for path in place.rglob("*.sqlite") if "perturbed" not in path.parts)
            if not inside:
                raise AgentrigError(f"{place} holds no file *.sqlite; name a database or a folder of databases")
            found += inside
        elif place.is_file():
            found.append(place)
        else:
            raise AgentrigError(f"{place} does not exist; name a database or a folder of databases")
    return found


@click.command("perturb")
@click.argument("places", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--copies", default=3, show_default=True, type=click.IntRange(1), help="Copies of each database.")
@click.option("--seed", default=0, show_default=True, help="The same seed makes the same copies.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the copies; default: beside each database.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def perturb_command(places: Sequence[Path], copies: int, seed: int, out: Path | None, as_json: bool) -> None:
    """Make perturbed copies of databases, on which the reward spider-exec-strict also tests answers.

    PLACES are SQLite files, or folders with SQLite files. Without --out the copies of DIR/NAME.sqlite go to
    DIR/perturbed/, where the reward finds them; with --out they go to OUT/NAME/, and you set the
    reward's key `copies` to OUT.

    Example: agentrig data perturb spider/database --copies 3 --out copies
    """
    report = []
    for database in find_databases(places):
        folder = database.parent / "perturbed" if out is None else out / database.stem
        for number in range(1, copies + 1):
            target = folder / f"{database.stem}-{seed}-{number}.sqlite"
            done = perturb(database, target, seed=seed * 1_000_003 + number)
            report.append({"database": str(database), "copy": str(target), **done})
            if not as_json:
                click.echo(f"{target}: rows -{done['removed']} +{done['added']}, cells changed {done['replaced']}")
    if as_json:
        click.echo(json.dumps(report, indent=2))
