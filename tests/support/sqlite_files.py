"""SQLite files for the tests."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any


def sqlite_file(path: Path, script: str, **rows: Iterable[Sequence[Any]]) -> Path:
    """Make or change a database by a script of statements, add rows to the tables named, and return its path."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executescript(script)
        for table, content in rows.items():
            for row in content:
                connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)
    return path
