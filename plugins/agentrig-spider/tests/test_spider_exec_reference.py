"""Mode `official` against the official verdicts of `exec_cases.jsonl` and `exec_pairs.jsonl`."""

from __future__ import annotations

import json
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from agentrig_spider import ExecMatch
from sqlite_files import sqlite_file

ROOT = Path(__file__).resolve().parents[3]
SPIDER = Path(os.environ.get("AGENTRIG_SPIDER_DIR", ROOT.parent / "shared" / "spider"))

EXCEPTIONS: dict[str, tuple[str, float | None]] = {
    # The plugin's README gives the reason of each.
    "empty_gold_ddl_pred": ("ok", 0.0),
    "empty_gold_whitespace_pred": ("ok", 0.0),
    "empty_string_pred": ("ok", 0.0),
    "delete_returning": ("ok", 0.0),
    "insert_plain": ("ok", 0.0),
    "alter_rename_poison": ("ok", 0.0),
    "create_trigger": ("ok", 0.0),
    "pragma_journal_wal": ("ok", 0.0),
    "vacuum_into_file": ("ok", 0.0),
    "recursive_cte_infinite_rows": ("ok", 0.0),
    "cartesian_product_hang": ("timeout", 0.0),
    "huge_blob_result": ("ok", 0.0),
    "deep_parens": ("ok", 0.0),
    "wide_binary_12cols_same": ("ok", 1.0),
    "gold_and_pred_error": ("invalid", None),
    "suite_stray_sqlite_file": ("invalid", None),
}
"""Cases in which the official code hangs, raises or lets a query write, with the verdict chosen here."""


def rows(name: str) -> list[dict[str, Any]]:
    path = SPIDER / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


needs_spider = pytest.mark.skipif(
    not (SPIDER / "exec_cases.jsonl").exists(), reason=f"no exec_cases.jsonl in {SPIDER}; set AGENTRIG_SPIDER_DIR"
)


def build(folder: Path, case: dict[str, Any]) -> Path:
    database = folder / "case.sqlite"
    for path, schema in [
        (database, case["schema_sql"]),
        *((folder / f"extra{index}.sqlite", sql) for index, sql in enumerate(case.get("extra_schema_sql", []))),
    ]:
        sqlite_file(path, schema)
    for name, content in case.get("stray", {}).items():
        Path(name.replace("@DB@", str(database))).write_text(content)
    return database


def runs_at_all(sql: str) -> bool:
    connection = sqlite3.connect(":memory:")
    try:
        connection.execute(sql)
    except sqlite3.OperationalError:
        return False
    finally:
        connection.close()
    return True


@needs_spider
@pytest.mark.parametrize("case", rows("exec_cases.jsonl"), ids=lambda case: case["name"])
def test_case(case: dict[str, Any], tmp_path: Path) -> None:
    database = build(tmp_path, case)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    match = ExecMatch(timeout_s=1.0, keep_distinct=case.get("flags", {}).get("keep_distinct", False))
    score = match.score(case["pred"].replace("@DIR@", str(tmp_path)), case["gold"], database)
    official = case["official_verdict"]
    expected = EXCEPTIONS.get(case["name"], ("ok", official))
    if case["name"] == "deep_parens" and runs_at_all(case["pred"]):
        expected = ("ok", 1.0)  # newer SQLite has no bound on its parser's stack
    assert (score.status, score.value) == expected, score
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@needs_spider
def test_exceptions_are_only_where_the_official_code_hangs_raises_or_writes() -> None:
    by_name = {case["name"]: case for case in rows("exec_cases.jsonl")}
    for name in EXCEPTIONS:
        case = by_name[name]
        writes = case.get("db_mutated") or case.get("new_files") or name in ("delete_returning", "insert_plain")
        assert writes or isinstance(case["official_verdict"], str), name


@needs_spider
def test_pairs() -> None:
    match = ExecMatch()
    pairs = rows("exec_pairs.jsonl")
    assert len(pairs) >= 1000
    wrong = []
    for pair in pairs:
        score = match.score(pair["pred"], pair["gold"], SPIDER / pair["db"])
        if score.value != pair["official_verdict"]:
            wrong.append((pair, score))
    assert not wrong


@needs_spider
@pytest.mark.parametrize(
    ("mode", "split", "failing"),
    [
        ("official", "dev", 0),
        ("strict", "dev", 0),
        pytest.param("official", "test", 0, marks=pytest.mark.slow),
        pytest.param("strict", "test", 0, marks=pytest.mark.slow),
        pytest.param("official", "train_spider", 3, marks=pytest.mark.slow),
        pytest.param("strict", "train_spider", 3, marks=pytest.mark.slow),
    ],
)
def test_gold_against_gold(mode: Any, split: str, failing: int) -> None:
    import pyarrow.parquet

    match = ExecMatch(mode)
    folder = SPIDER / ("test_database" if split == "test" else "database")
    failed = []
    for row in pyarrow.parquet.read_table(SPIDER / f"{split}.parquet").to_pylist():
        database = folder / row["db_id"] / f"{row['db_id']}.sqlite"
        # With a comment in front the two are not recognized as the same text, so both run.
        score = match.score(f"/* prediction */ {row['query']}", row["query"], database)
        if score.value != 1.0:
            failed.append((score.status, score.details["reason"]))
    assert [status for status, _ in failed] == ["invalid"] * failing, failed
