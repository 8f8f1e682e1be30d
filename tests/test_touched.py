"""`--touched`, with which `.ci/run` runs the slow tests of the code that changed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TESTS = """
import time
import pytest

def test_quick():
    pass

@pytest.mark.slow
@pytest.mark.parametrize("n", range(2))
def test_slow(n):
    time.sleep(0.1)

@pytest.mark.slow
@pytest.mark.timeout(900)
def test_slow_and_long():
    raise AssertionError("only make test-slow runs it")
"""
FOLDERS = ("tests/run", "tests/gateway", "plugins/agentrig-x/tests")
SETTINGS = """
[tool.pytest.ini_options]
addopts = "--import-mode=importlib -m 'not slow'"
markers = ["slow: a", "alone: b"]
timeout = 300
"""


@pytest.fixture
def commit(tmp_path: Path) -> Callable[[str, int], None]:
    """Return a function that commits a new file at an hour; tests of three folders were committed at hour 0."""

    def git(*words: str, hour: int = 0) -> None:
        date = f"2026-01-01T{hour:02}:00:00Z"
        dates = {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
        own = ["-c", "user.name=a", "-c", "user.email=a@localhost"]
        subprocess.run(["git", *own, *words], cwd=tmp_path, env=os.environ | dates, check=True, capture_output=True)

    def add(file: str, hour: int) -> None:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("")
        git("add", ".")
        git("commit", "-m", file, hour=hour)

    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "pyproject.toml").write_text(SETTINGS)
    for folder in FOLDERS:
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "test_it.py").write_text(TESTS)
    git("init", "-q")
    add("README.md", 0)
    return add


def ran(root: Path, **variables: str) -> tuple[set[str], str]:
    """Return the files whose slow tests ran, and what pytest printed."""
    words = [sys.executable, "-m", "pytest", "-v", "-ra", "-p", "no:cacheprovider", "-p", "pytest_timeout", "--touched"]
    variables["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # it starts in a third of the time
    done = subprocess.run(words, cwd=root, env=os.environ | variables, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"{folder}/test_it.py::test_quick PASSED" in done.stdout for folder in FOLDERS)
    return set(re.findall(r"^(\S+)::test_slow\S* PASSED", done.stdout, re.M)), done.stdout


def test_slow_tests_of_code_that_changed_within_three_hours_run(
    tmp_path: Path, commit: Callable[[str, int], None]
) -> None:
    commit("src/agentrig/gateway/apis.py", 5)
    commit("src/agentrig/run/training.py", 9)
    commit("plugins/agentrig-x/src/x.py", 11)
    assert ran(tmp_path)[0] == {"tests/run/test_it.py", "plugins/agentrig-x/tests/test_it.py"}


def test_a_base_decides_what_has_changed(tmp_path: Path, commit: Callable[[str, int], None]) -> None:
    commit("src/agentrig/gateway/apis.py", 5)
    commit("docs/index.md", 11)
    assert ran(tmp_path)[0] == set()
    assert ran(tmp_path, CI_BASE="HEAD~2")[0] == {"tests/gateway/test_it.py"}
