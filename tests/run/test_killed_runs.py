"""Runs of random models that are killed and resumed: two scripts of tests/benchmarks at a small size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
SPIDER = {"AGENTRIG_SPIDER_DIR", "VERL_SPIDER_DATA_DIR"} & os.environ.keys()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not Path("/proc/self/environ").is_file(), reason="finds a run's processes in /proc"),
]


def figures_of(script: str, *words: str) -> dict:
    done = subprocess.run([sys.executable, str(FOLDER / script), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    table, _, rest = done.stdout.partition("{")
    assert table.startswith("| step |")
    return json.loads("{" + rest)


def test_long_prompts_on_a_device_are_killed_and_resumed() -> None:
    figures = figures_of(
        "embedded_gpu.py", "--hardware", "cpu", "--shape", "tiny", "--max-tokens", "16", "--tasks", "2"
    )
    assert figures["tensors that changed"] == 26


@pytest.mark.skipif(not SPIDER, reason="needs real Spider: set AGENTRIG_SPIDER_DIR")
def test_real_spider_through_the_agent_is_killed_and_resumed() -> None:
    words = ["--shape", "tiny", "--tasks", "2", "--max-tokens", "12", "--turns", "1", "--pause", "0.2"]
    figures = figures_of("embedded_spider.py", *words)
    assert figures["failures"] == {}
    assert figures["prompt tokens, mean of trained calls"] > 300
