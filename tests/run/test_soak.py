"""A short soak; `tests/benchmarks/soak.py` does a thousand steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "soak.py"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not Path("/proc/self/environ").is_file(), reason="finds a run's processes in /proc")
def test_thirty_steps_under_faults_lose_and_repeat_nothing() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--steps", "30", "--seed", "1"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    figures = json.loads(done.stdout)
    assert figures["launches"] >= 2, "at least one fault has ended the run"
    assert figures["kill runner"] >= 1
    calls = figures["calls"]
    assert calls["recorded"] == calls["trained"] + calls["masked"] + sum(figures["dropped"].values())
    assert calls["trained"] > 0
    assert figures["dropped"]["failed-rollout"] > 0
    assert figures["audited"].endswith("links hold")
