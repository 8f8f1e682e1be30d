"""A worker that starts late on a busy machine costs the query nothing."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from agentrig_langgraph_sql.database import DatabaseBroken, run_query
from agentrig_spider.sandbox import pool
from sqlite_files import sqlite_file

LATE = """
import runpy, time
time.sleep({seconds})
runpy.run_path({real!r}, run_name="__main__")
"""

HOSTILE = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return sqlite_file(tmp_path / "a.sqlite", "CREATE TABLE t (x)")


def start_late(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seconds: float) -> None:
    """Let each new worker's process take this long to start, as at a load of 65."""
    script = tmp_path / "late.py"
    script.write_text(LATE.format(seconds=seconds, real=str(pool._SCRIPT)))
    pool.WORKERS.close()
    monkeypatch.setattr(pool, "_SCRIPT", script)


@pytest.mark.slow
def test_hostile_queries_at_once_whose_workers_start_late(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_late(monkeypatch, tmp_path, 1.5)
    try:
        with ThreadPoolExecutor(24) as threads:
            found = list(threads.map(lambda i: run_query(database, HOSTILE, timeout_s=0.5), range(24)))
        assert {result.error for result in found} == {"the query was stopped after 0.5 s"}
    finally:
        pool.WORKERS.close()


def test_a_worker_that_does_not_start_is_named(database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_late(monkeypatch, tmp_path, 60.0)
    monkeypatch.setattr(pool, "START_LIMIT_S", 0.5)
    began = time.monotonic()
    try:
        with pytest.raises(DatabaseBroken, match=r"no worker process started within 0\.5 s.*fewer runners"):
            run_query(database, HOSTILE, timeout_s=0.5)
        assert time.monotonic() - began < 10
    finally:
        pool.WORKERS.close()
