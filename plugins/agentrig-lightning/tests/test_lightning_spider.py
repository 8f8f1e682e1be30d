"""A LitAgent that has no key trains on our own model servers and real Spider: `dev`, then three `grpo` steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from spider_runs import GPU, agentrig

pytest.importorskip("agentrig_grpo")

PLUGIN = Path(__file__).parents[3] / "tests" / "support" / "lightning_keyless.py"
SMALL = ("algorithm.model=mini", "algorithm.max_length=0", "algorithm.max_tokens=60", "runners.n=1")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("server", ["embedded", pytest.param("vllm", marks=GPU)])
def test_an_agent_without_the_runs_key_trains_on_our_servers(server: str, spider_dir: Path, tmp_path: Path) -> None:
    chosen = ["spider", "--plugin", str(PLUGIN), "--agent", "keyless", "--reward", "own", "--server", server, *SMALL]
    tried = agentrig("dev", *chosen, "--split", "train", "--limit", "2", "--json", folder=tmp_path, spider=spider_dir)
    assert all(row["value"] is not None for row in json.loads(tried))

    steps = ("steps=3", "tasks_per_step=2", "group_size=4", "lr=1e-4", "validate_every=3")
    tasks = (
        *("run.train_tasks=4", "run.validation=test_dev_500", "run.validation_tasks=2"),
        *("run.report=test", "run.report_tasks=2"),
    )
    words = ["train", *chosen, *tasks, *(f"algorithm.{step}" for step in steps), "run.name=keyless", "--json"]
    summary = json.loads(agentrig(*words, folder=tmp_path, spider=spider_dir))
    assert (summary["steps"], summary["failures"]) == (3, {})
