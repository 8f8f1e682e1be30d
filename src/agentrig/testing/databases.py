"""A SQLite database with one table, for agents and rewards that work on SQL."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

ROWS = ((1, "Tom", "cat", 4.5), (2, "Zoë", "crane", None), (3, "Kaa", "snake", 12.0), (4, "O'Hara", "cat", 3.25))
"""The rows of `animal`: id, name, species, weight in kilograms. A name is beyond ASCII, one has a quote."""


def one_table_database(folder: Path) -> Path:
    """Write `zoo.sqlite` with the table `animal` into a folder, and return its path."""
    path = folder / "zoo.sqlite"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE animal (id INTEGER PRIMARY KEY, name TEXT, species TEXT, kg REAL)")
        connection.executemany("INSERT INTO animal VALUES (?, ?, ?, ?)", ROWS)
    return path
