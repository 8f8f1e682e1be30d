"""The tests of the page "Test a plugin" pass, and break when the reward does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pages import ROOT, blocks

PAGE = ROOT / "docs" / "how-to" / "test-a-plugin.md"


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-rfs", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    return subprocess.run(
        [*command, "test_my_reward.py"], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_pages_tests_pass_and_find_a_fault(tmp_path: Path) -> None:
    plugin, tests, _ = (b.text for b in blocks() if b.page == PAGE and b.language == "python")
    (tmp_path / "my_reward.py").write_text(plugin)
    (tmp_path / "test_my_reward.py").write_text(tests)
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "give ladder=FUNCTION(task)" in done.stdout  # a skipped check says why
    (tmp_path / "my_reward.py").write_text(plugin.replace("float(outcome.answer ==", "float(outcome.answer !="))
    done = run(tmp_path)
    assert done.returncode == 1
    assert "reward.gold" in done.stdout
    assert "what to do: Score the task's own right answer" in done.stdout
