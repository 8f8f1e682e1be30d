"""tests/benchmarks/exec_match.py fails if the two sides do not give the same verdicts: then they do not do the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from sqlite_files import sqlite_file

SCRIPT = Path(__file__).parents[3] / "tests" / "benchmarks" / "exec_match.py"


@pytest.mark.parametrize(
    ("predicted", "recorded", "lenient", "said"),
    [
        ("SELECT age FROM band", 0, False, ""),
        ("SELECT age FROM band", 1, False, "1 in the file, 0 official, 0 and 0 ExecMatch"),
        ("SELECT age FROM band", 0, True, "0 in the file, 1 official, 0 and 0 ExecMatch"),
        ("DELETE FROM band", 0, True, ""),
    ],
)
def test_a_verdict_that_differs_ends_the_comparison_with_an_error(
    tmp_path: Path, predicted: str, recorded: int, lenient: bool, said: str
) -> None:
    database = tmp_path / "band" / "band.sqlite"
    database.parent.mkdir()
    sqlite_file(database, "CREATE TABLE band (name TEXT, age INT)", band=[("Ada", 3)])
    gold = {"pred": "SELECT name FROM band", "gold": "SELECT name FROM band", "db": str(database)}
    rows = [{**gold, "official_verdict": 1}, {**gold, "pred": predicted, "official_verdict": recorded}]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "exec_eval.py").write_text("def eval_exec_match(**words):\n    return 1\n")
    words = [sys.executable, str(SCRIPT), "--pairs", str(tmp_path / "pairs.jsonl"), "--repeat", "1", "--json"]
    done = subprocess.run(
        [*words, "--official", str(tmp_path)] if lenient else words, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == (1 if said else 0), done.stderr
    assert said in done.stderr
    assert json.loads(done.stdout)["pairs"] == 2
