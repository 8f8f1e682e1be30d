"""Agent Lightning's SQL agent on our own model servers and real Spider, unchanged: `dev`, then three `grpo` steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agentrig_grpo")

PLUGIN = Path(__file__).parent / "support" / "lightning_keyless.py"
SMALL = ("algorithm.model=mini", "algorithm.max_length=0", "algorithm.max_tokens=60", "runners.n=1")


def agentrig(*words: str, folder: Path, spider: Path, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    """Run a command as a user of Agent Lightning does: Spider is named by upstream's variable, and there is no key."""
    environment = {k: v for k, v in os.environ.items() if k not in ("OPENAI_API_KEY", "AGENTRIG_SPIDER_DIR")}
    return subprocess.run(
        [sys.executable, "-m", "agentrig", *words],
        cwd=folder,
        env={**environment, "VERL_SPIDER_DATA_DIR": str(spider)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def test_an_agent_without_the_runs_key_trains_on_the_embedded_server(spider_dir: Path, tmp_path: Path) -> None:
    chosen = ["spider", "--plugin", str(PLUGIN), "--agent", "keyless", "--reward", "own", *SMALL]
    tried = agentrig("dev", *chosen, "--split", "train", "--limit", "2", "--json", folder=tmp_path, spider=spider_dir)
    assert tried.returncode == 0, tried.stderr[-3000:]
    assert all(row["value"] is not None for row in json.loads(tried.stdout))

    steps = ("steps=3", "tasks_per_step=2", "group_size=4", "lr=1e-4", "validate_every=3")
    tasks = (
        "run.train_tasks=4",
        "run.validation=test_dev_500",
        "run.validation_tasks=2",
        "run.report=test",
        "run.report_tasks=2",
    )
    words = ["train", *chosen, *tasks, *(f"algorithm.{step}" for step in steps), "run.name=keyless", "--json"]
    trained = agentrig(*words, folder=tmp_path, spider=spider_dir)
    assert trained.returncode == 0, trained.stderr[-3000:]
    summary: dict[str, Any] = json.loads(trained.stdout)
    assert (summary["steps"], summary["failures"]) == (3, {})
