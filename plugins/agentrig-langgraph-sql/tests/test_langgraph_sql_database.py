from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import pytest
from agentrig_langgraph_sql.database import DatabaseBroken, Result, connect, run_query

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT "


def test_a_query_gives_columns_and_rows(zoo: Path) -> None:
    result = run_query(zoo, "SELECT name, born FROM animal WHERE id > 2 ORDER BY id")
    assert result == Result(columns=["name", "born"], rows=[("Kaa", None), ("Leo", 2021)])
    assert result.text() == "name | born\nKaa | NULL\nLeo | 2021"
    assert result.text(header=False) == "Kaa | NULL\nLeo | 2021"


@pytest.mark.parametrize(
    "query",
    [
        "DELETE FROM animal",
        "INSERT INTO animal VALUES (9, 'x', 1, 1) RETURNING id",
        "ATTACH DATABASE 'other.sqlite' AS other",
        "VACUUM INTO 'other.sqlite'",
        "PRAGMA journal_mode = WAL",
        "BEGIN EXCLUSIVE",
        "SELECT load_extension('evil')",
    ],
)
def test_statements_that_write_are_refused(zoo: Path, query: str) -> None:
    before = zoo.read_bytes()
    assert run_query(zoo, query).text() == "Error: only a SELECT that reads the tables is allowed"
    assert zoo.read_bytes() == before
    assert sorted(p.name for p in zoo.parent.iterdir()) == ["zoo.sqlite"]


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("SELECT nme FROM animal", "no such column: nme"),
        ("SELECT 1; DELETE FROM animal", "one statement at a time"),
        ("SELEC 1", "syntax error"),
        ("SELECT 'a\0'", "null character"),
        ("SELECT '\ud800'", "surrogates"),
        ("SELECT zeroblob(1000000000)", "too big"),
        ("SELECT abs(-9223372036854775808)", "integer overflow"),
    ],
)
def test_query_errors_are_text_for_the_model(zoo: Path, query: str, words: str) -> None:
    text = run_query(zoo, query).text()
    assert text.startswith("Error: ")
    assert words in text


@pytest.mark.alone
@pytest.mark.parametrize("query", [ENDLESS + "count(*) FROM n", ENDLESS + "i FROM n WHERE i < 0"])
def test_an_endless_query_is_stopped(zoo: Path, query: str) -> None:
    start = time.monotonic()
    assert run_query(zoo, query, timeout_s=0.2).text() == "Error: the query was stopped after 0.2 s"
    assert time.monotonic() - start < 2


def test_large_values_stop_fetching(zoo: Path) -> None:
    result = run_query(zoo, ENDLESS + "zeroblob(1000) FROM n", max_rows=10**9, max_chars=10_000)
    assert (len(result.rows), result.more) == (10, True)


@pytest.mark.parametrize("limit", [64, 100, 333, 2048])
@pytest.mark.parametrize("header", [True, False])
def test_a_long_result_is_cut_after_a_row_with_a_note(zoo: Path, limit: int, header: bool) -> None:
    result = run_query(zoo, ENDLESS + "i, 'number ' || i AS words FROM n LIMIT 900")
    *lines, note = result.text(limit, header=header).splitlines()
    assert len("\n".join([*lines, note])) <= limit
    rows = lines[1:] if header else lines
    assert rows == [f"{i} | number {i}" for i in range(1, len(rows) + 1)]
    assert note == f"... (cut off: {len(rows)} of 900 rows shown)"


def test_cells_have_no_line_breaks(zoo: Path) -> None:
    text = run_query(zoo, "SELECT 'a' || char(13, 10) || 'b' AS t, x'00ff' AS b, 1.5 AS f").text(header=False)
    assert text == "a\\r\\nb | x'00ff' | 1.5"


def test_text_that_is_not_utf_8_is_read(zoo: Path) -> None:
    assert run_query(zoo, "SELECT CAST(x'41ff42' AS TEXT) AS t").rows == [("A�B",)]


def test_a_missing_or_damaged_file_is_the_environments_fault(zoo: Path, tmp_path: Path) -> None:
    with pytest.raises(DatabaseBroken, match=r"nowhere\.sqlite: unable to open"):
        run_query(tmp_path / "nowhere.sqlite", "SELECT 1")
    assert not (tmp_path / "nowhere.sqlite").exists()
    broken = tmp_path / "broken.sqlite"
    broken.write_bytes(b"this is no database" * 100)
    with pytest.raises(DatabaseBroken, match="not a database"):
        run_query(broken, "SELECT * FROM animal")


def test_a_file_that_is_half_written_is_the_environments_fault(zoo: Path) -> None:
    writer = sqlite3.connect(zoo, isolation_level=None)
    writer.execute("PRAGMA cache_size = 1")
    writer.execute("BEGIN")
    writer.execute(
        "WITH RECURSIVE n(i) AS (SELECT 10 UNION ALL SELECT i + 1 FROM n LIMIT 20000)"
        " INSERT INTO animal SELECT i, hex(randomblob(50)), 1, 1 FROM n"
    )
    try:
        with pytest.raises(DatabaseBroken, match=r"zoo\.sqlite-journal: close the programs that write to it"):
            run_query(zoo, "SELECT * FROM animal")
    finally:
        writer.close()


def test_changes_in_a_write_ahead_log_are_not_silently_missed(zoo: Path) -> None:
    writer = sqlite3.connect(zoo, isolation_level=None)
    writer.execute("PRAGMA journal_mode = WAL")
    writer.execute("DELETE FROM animal WHERE id = 1")
    try:
        with pytest.raises(DatabaseBroken, match=r"zoo\.sqlite-wal: close the programs .* wal_checkpoint"):
            run_query(zoo, "SELECT count(*) FROM animal")
        with pytest.raises(DatabaseBroken, match="wal"), connect(zoo):
            pass
    finally:
        writer.close()  # closing the last connection writes the log into the file
    assert run_query(zoo, "SELECT count(*) FROM animal").rows == [(3,)]
