"""A few kills of a real run; `tests/benchmarks/kills.py` does a hundred."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_runs_lose_and_repeat_no_step_and_leave_nothing_behind() -> None:
    script = Path(__file__).parents[1] / "benchmarks" / "kills.py"
    done = subprocess.run(
        [sys.executable, str(script), "--kills", "6", "--steps", "3", "--seed", "5"],
        capture_output=True,
        text=True,
        timeout=1100,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert sum(count for name, count in found.items() if name.startswith("by SIG")) == 6
    assert found["runs"] >= 1
    assert found["left"] == []
