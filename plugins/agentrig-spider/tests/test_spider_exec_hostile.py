"""Hostile queries: each ends in time, with little memory, with a typed score, and changes no file."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from agentrig_spider import ExecMatch
from agentrig_spider.sandbox import NeedsWorker, fingerprint, open_read_only, pool, run_query
from sqlite_files import sqlite_file

BUDGET_S = 0.8
ENDLESS = "WITH RECURSIVE r(i) AS (SELECT {} UNION ALL SELECT i + 1 FROM r) SELECT count(*) FROM r"
SCRIPT = Path(__file__).with_name("hostile_queries.py")
RIGHT = {"40 identical columns"}
"""Hostile to the matching only: the answer is right."""


MODES = ["official few", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("official", "strict"))]


@pytest.fixture(scope="module", params=MODES)
def endings(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    words = [sys.executable, str(SCRIPT), str(BUDGET_S), *request.param.split()]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert not done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_no_file_changes(endings: list[dict[str, Any]]) -> None:
    assert endings[-1] == {"unchanged": True}
    assert len(endings) > 30


def test_all_end_in_time(endings: list[dict[str, Any]]) -> None:
    late = {ending["name"]: ending["seconds"] for ending in endings[:-1] if ending["seconds"] > BUDGET_S + 0.5}
    assert not late


def test_memory_is_bounded(endings: list[dict[str, Any]]) -> None:
    large = {ending["name"]: ending["mebibytes"] for ending in endings[:-1] if ending["mebibytes"] > 512}
    assert not large


def test_all_count_as_wrong_predictions(endings: list[dict[str, Any]]) -> None:
    for ending in endings[:-1]:
        expected = 1.0 if ending["name"] in RIGHT else 0.0
        assert ending["status"] in ("ok", "timeout"), ending
        assert ending["value"] == expected, ending
        assert ending["reason"], ending


@pytest.fixture
def database(tmp_path: Path) -> Path:
    schema = "CREATE TABLE band (id INTEGER PRIMARY KEY, name TEXT)"
    return sqlite_file(tmp_path / "band.sqlite", schema, band=[(index, f"name {index}" * 9) for index in range(3000)])


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("none.sqlite", "none.sqlite"),
        ("none/x.sqlite", "none/x.sqlite"),
        (".", ""),
        ("garbage.sqlite", "not a database"),
    ],
)
def test_what_is_no_database_is_invalid(tmp_path: Path, place: str, said: str) -> None:
    (tmp_path / "garbage.sqlite").write_bytes(b"no database " * 500)
    score = ExecMatch().score("SELECT 1", "SELECT 1", tmp_path / place)
    assert score.status == "invalid"
    assert said in score.details["reason"]
    assert [file.name for file in tmp_path.iterdir()] == ["garbage.sqlite"]


def test_damage_that_only_the_prediction_reads_is_invalid(database: Path) -> None:
    sqlite_file(database, "CREATE TABLE small (a INTEGER)", small=[(1,)])
    content = bytearray(database.read_bytes())
    # Page 2 is the root of `band`; `small` begins behind all of its pages.
    content[4096 : 4096 * 10] = b"\xee" * (4096 * 9)
    database.write_bytes(content)
    match = ExecMatch()
    assert match.score("SELECT a + 0 FROM small", "SELECT a FROM small", database).value == 1.0
    score = match.score("SELECT id FROM band", "SELECT a FROM small", database)
    assert score.status == "invalid"
    assert "damaged" in score.details["reason"]


@pytest.mark.alone
def test_a_locked_database_is_read_without_waiting(database: Path) -> None:
    holder = sqlite3.connect(database)
    holder.execute("PRAGMA locking_mode = EXCLUSIVE")
    holder.execute("BEGIN EXCLUSIVE")
    start = time.monotonic()
    score = ExecMatch().score("SELECT id + 0 FROM band", "SELECT id FROM band", database)
    holder.close()
    assert (score.status, score.value) == ("ok", 1.0)
    assert time.monotonic() - start < 1.0


def test_a_database_that_is_deleted_between_queries_is_invalid(database: Path) -> None:
    match = ExecMatch()
    assert match.score("SELECT id + 0 FROM band", "SELECT id FROM band", database).value == 1.0
    database.unlink()
    assert match.score("SELECT id + 0 FROM band", "SELECT id FROM band", database).status == "invalid"


@pytest.mark.alone
def test_a_database_that_is_deleted_during_a_query_gives_a_typed_score(database: Path) -> None:
    timer = threading.Timer(0.2, database.unlink)
    timer.start()
    start = time.monotonic()
    sql = "SELECT count(*) FROM band a, band b, band c WHERE a.name || b.name = c.name"
    score = ExecMatch(timeout_s=0.6).score(sql, "SELECT count(*) FROM band", database)
    timer.join()
    assert score.status in ("timeout", "invalid")
    assert time.monotonic() - start < 1.1


def test_a_database_that_is_rewritten_is_read_again(database: Path) -> None:
    match = ExecMatch()
    assert match.score("SELECT 3000", "SELECT count(*) FROM band", database).value == 1.0
    sqlite_file(database, "DELETE FROM band WHERE id > 9")
    assert match.score("SELECT 3000", "SELECT count(*) FROM band", database).value == 0.0
    assert match.score("SELECT 10", "SELECT count(*) FROM band", database).value == 1.0


@pytest.mark.alone
def test_an_endless_gold_is_invalid_in_time(database: Path) -> None:
    start = time.monotonic()
    score = ExecMatch(timeout_s=0.3).score("SELECT 1", ENDLESS.format(1), database)
    assert score.status == "invalid"
    assert time.monotonic() - start < 0.8


def test_a_read_only_folder_does_not_matter(database: Path) -> None:
    database.chmod(0o444)
    database.parent.chmod(0o555)
    try:
        assert ExecMatch().score("SELECT id + 0 FROM band", "SELECT id FROM band", database).value == 1.0
    finally:
        database.parent.chmod(0o755)


def test_odd_paths(database: Path) -> None:
    odd = database.parent / "a b%20c?d#e&mode=rwc" / "ü.sqlite"
    odd.parent.mkdir()
    database.rename(odd)
    assert ExecMatch().score("SELECT id + 0 FROM band", "SELECT id FROM band", odd).value == 1.0


def test_a_connection_cannot_write_even_without_its_authorizer(database: Path) -> None:
    connection = open_read_only(str(database))
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        connection.execute("DELETE FROM band")
    connection.close()


@pytest.mark.parametrize(
    "sql",
    [
        "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM r) SELECT i FROM r LIMIT 1",
        "SELECT hex(name) FROM band",
        "SELECT count(*) FROM band a, band b",
        "SELECT * FROM json_each('[1]')",
        f"SELECT '{'x' * 3000}'",
        f"SELECT {'(' * 101}1{')' * 101}",
    ],
)
def test_risky_queries_do_not_run_in_this_process(database: Path, sql: str) -> None:
    mark = fingerprint(str(database))
    with pytest.raises(NeedsWorker):
        run_query(str(database), mark, sql, max_rows=1, deadline=time.monotonic() + 5, workers=False)


NO_QUERIES = [
    "REINDEX",
    "REINDEX band",
    "DROP TABLE IF EXISTS none",
    "DROP VIEW IF EXISTS none",
    "DROP INDEX IF EXISTS none",
    "DROP TRIGGER IF EXISTS none",
    "VACUUM",
    "ANALYZE",
    "-- nothing",
]
"""SQLite calls its authorizer for hardly any of these, because they have nothing to do."""


@pytest.mark.parametrize("sql", NO_QUERIES)
@pytest.mark.parametrize("workers", [False, True])
def test_statements_that_are_no_query_do_not_match_an_empty_gold(
    database: Path, sql: str, workers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if workers:
        monkeypatch.setattr("agentrig_spider.sandbox.query.looks_plain", lambda sql: False)
    score = ExecMatch().score(sql, "SELECT id FROM band WHERE id < 0", database)
    assert (score.status, score.value) == ("ok", 0.0)
    assert "fails" in score.details["reason"]


@pytest.mark.parametrize("sql", ["BEGIN", "SAVEPOINT a", "PRAGMA no_such_name", "SELECT id FROM band WHERE 0"])
def test_queries_without_rows_match_an_empty_gold(database: Path, sql: str) -> None:
    assert ExecMatch().score(sql, "SELECT id FROM band WHERE id < 0", database).value == 1.0


@pytest.mark.alone
def test_the_budget_holds_with_many_callers_at_once(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many more callers than workers; each has its own endless query."""
    monkeypatch.setattr(pool.WORKERS, "_free", threading.BoundedSemaphore(4))
    match = ExecMatch(timeout_s=1.0)
    assert match.score("SELECT count(id) FROM band", "SELECT count(*) FROM band", database).value == 1.0
    found: list[tuple[float, Any]] = []

    def ask(number: int) -> None:
        start = time.monotonic()
        score = match.score(ENDLESS.format(number), "SELECT count(*) FROM band", database)
        found.append((time.monotonic() - start, score))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # The budget is half a second; the rest allows for a busy machine.
    assert max(seconds for seconds, _ in found) < 1.0 + 0.5 + 1.0
    assert {score.status for _, score in found} <= {"timeout", "invalid"}
    assert 4 <= sum(score.status == "timeout" for _, score in found) < 24
    for _, score in found:
        if score.status == "invalid":
            assert "was not judged within 1 s" in score.details["reason"]
    assert match.score("SELECT hex(1)", "SELECT hex(1) AS x", database).value == 1.0


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="this system does not show another's environment")
def test_workers_get_no_keys(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    pool.WORKERS.close()
    assert ExecMatch().score("SELECT hex(1)", "SELECT hex(1) AS x", database).value == 1.0
    for worker in pool.WORKERS._all:
        assert b"secret" not in Path(f"/proc/{worker._process.pid}/environ").read_bytes()


def test_a_killed_worker_is_replaced(database: Path) -> None:
    match = ExecMatch()
    assert match.score("SELECT hex(name) FROM band", "SELECT hex(name) FROM band WHERE 1", database).value == 1.0
    for worker in list(pool.WORKERS._all):
        worker._process.kill()
    assert match.score("SELECT hex(id) FROM band", "SELECT hex(id) FROM band WHERE 1", database).value == 1.0


def test_workers_end_with_their_process(database: Path) -> None:
    code = (
        "import sys; from agentrig_spider import ExecMatch; from agentrig_spider.sandbox.pool import WORKERS\n"
        "ExecMatch().score('SELECT hex(id) FROM band', 'SELECT hex(1)', sys.argv[1])\n"
        "print([worker._process.pid for worker in WORKERS._all][0])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(database)], capture_output=True, text=True, check=True)
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)
