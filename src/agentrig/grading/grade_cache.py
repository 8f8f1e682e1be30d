"""A cache of grades: in memory, and in an SQLite file for later runs."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrig.errors import ConfigError

WAIT_S = 10.0
"""Seconds to wait for another run that writes into the same file."""


class GradeCache:
    """A cache of JSON objects by text; several threads, and several runs with one file, may use it.

    Args:
        file: The SQLite file, made if it is not there; None for none.

    Raises:
        ConfigError: The file cannot be opened, or is no file of grades.
    """

    def __init__(self, file: Path | None) -> None:
        self._known: dict[str, Mapping[str, Any]] = {}
        self._lock = threading.Lock()
        self._file: sqlite3.Connection | None = None
        if file is None:
            return
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(file, timeout=WAIT_S, check_same_thread=False, isolation_level=None)
            self._file.execute("CREATE TABLE IF NOT EXISTS graded (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"the file of grades {file} cannot be used: {error}") from error

    def get(self, key: str) -> Mapping[str, Any] | None:
        """Return what is remembered for a text, or None."""
        name = _name(key)
        with self._lock:
            if name not in self._known and self._file is not None:
                row = self._file.execute("SELECT value FROM graded WHERE key = ?", (name,)).fetchone()
                if row:
                    self._known[name] = json.loads(row[0])
            return self._known.get(name)

    def put(self, key: str, value: Mapping[str, Any]) -> None:
        """Remember an object for a text."""
        name = _name(key)
        with self._lock:
            self._known[name] = value
            if self._file is not None:
                self._file.execute("INSERT OR REPLACE INTO graded VALUES (?, ?)", (name, json.dumps(value)))


def _name(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
