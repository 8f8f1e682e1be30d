"""Tests on several workers: a test marked `alone` runs while no other does, even if the others never pause."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TESTS = """
import json, time
from pathlib import Path
import pytest

def spend(name, kind):
    start = time.monotonic()
    time.sleep(0.1)
    with open({times!r}, "a") as file:
        file.write(json.dumps([kind, start, time.monotonic()]) + chr(10))

@pytest.mark.{mark}
def test_first():
    spend("first", {mark!r})

@pytest.mark.parametrize("number", range(6))
def test_others(number):
    spend(number, "shared")
"""


@pytest.mark.slow
@pytest.mark.parametrize("mark", ["alone", "together"])
def test_a_test_that_is_marked_alone_runs_while_no_other_does(tmp_path: Path, mark: str) -> None:
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["alone: a", "together: b"]\n')
    times = tmp_path / "times"
    for name in "abc":
        (tmp_path / f"test_{name}.py").write_text(TESTS.format(times=str(times), mark=mark))
    words = [sys.executable, "-m", "pytest", "-q", "-n", "3", "--dist", "loadfile", str(tmp_path)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    spent = [json.loads(line) for line in times.read_text().splitlines()]
    assert len(spent) == 21
    alone = [(start, end) for kind, start, end in spent if kind == mark]
    met = sum(start < e and s < end for start, end in alone for _, s, e in spent) - len(alone)
    assert (met == 0) is (mark == "alone")  # without the mark the same tests do overlap, so the check works
