"""Upstream's SQL example, unmodified, trains on our own model servers: `warmup`, `dev`, and its training script.

    export AGENTRIG_AGENT_LIGHTNING=/path/to/agent-lightning-0.3.0
    python -m pytest -m slow plugins/agentrig-lightning/tests/upstream/test_training.py

The scripted server of `test_upstream.py` takes any key, and knows no context: these runs see what a user sees. On a
host with a GPU they use vLLM too. `AGENTRIG_TEST_MODEL` names an instruct model; without it, `warmup` makes one.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from spider_runs import GPU, agentrig

pytest.importorskip("agentrig_grpo")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

PLUGIN = """
from sql_agent import LitSQLAgent
import agentrig_lightning as lightning
from agentrig import hookimpl

@hookimpl
def register_agents():
    yield lightning.agent(LitSQLAgent, name="lit-sql", summary="Upstream's.", whole_rows=True)
"""
FEW = ("runners.n=1", "runners.threads=4", "run.train_tasks=2", "run.validation_tasks=1")
AGENT = ("spider", "--plugin", "lit.py", "--agent", "lit-sql", "--reward", "own")
SPLITS = ("run.validation=test_dev_500", "run.report=test", "run.report_tasks=1")


@pytest.fixture(scope="module")
def example(checkout: Path, spider_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of upstream's folder, with Spider as its `data`."""
    folder = tmp_path_factory.mktemp("upstream") / "spider"
    shutil.copytree(checkout / "examples" / "spider", folder, ignore=shutil.ignore_patterns("data", "models", "runs"))
    (folder / "data").symlink_to(spider_dir)
    (folder / "lit.py").write_text(PLUGIN)
    return folder


@pytest.fixture(scope="module")
def model(example: Path, spider_dir: Path) -> Path:
    """A model that answers two training questions right, mostly; LitSQLAgent asks for 2048 tokens with each call."""
    if os.environ.get("AGENTRIG_TEST_MODEL"):
        return Path(os.environ["AGENTRIG_TEST_MODEL"])
    size = ("--labels", "2", "--context", "6144", "--parameters", "3e5", "--minutes", "15", "--passes", "40")
    keys = (*SPLITS, *FEW, "algorithm.max_length=0", "algorithm.max_tokens=80")
    agentrig(
        "warmup",
        *AGENT,
        *size,
        "--no-measure",
        "--out",
        "model",
        *keys,
        folder=example,
        spider=spider_dir,
        timeout=1200,
    )
    return example / "model"


def test_the_agent_answers_in_dev(example: Path, model: Path, spider_dir: Path) -> None:
    keys = (*FEW, f"algorithm.model={model}", "algorithm.max_length=0", "algorithm.max_tokens=80")
    tried = agentrig(
        "dev",
        *AGENT,
        *keys,
        "--split",
        "train",
        "--limit",
        "2",
        "--json",
        folder=example,
        spider=spider_dir,
        timeout=600,
    )
    rows = json.loads(tried)
    assert [row["value"] is not None for row in rows] == [True, True]


@pytest.mark.parametrize("server", ["embedded", pytest.param("vllm", marks=GPU)])
def test_the_training_script_takes_three_steps_of_grpo(
    server: str, example: Path, model: Path, spider_dir: Path
) -> None:
    # At temperature 1 all 16 rollouts of a step are right half of the time, and the run then stops: nothing to learn.
    steps = ("steps=3", "tasks_per_step=2", "group_size=8", "lr=1e-4", "temperature=1.3")
    keys = (*FEW, f"server.use={server}", f"run.name={server}", *(f"algorithm.{step}" for step in steps))
    words = ["train_sql_agent.py", "fast", "--active-agent", "write", "--algorithm", "grpo", "--model", str(model)]
    printed = agentrig(
        "run",
        *words,
        *(part for key in keys for part in ("--set", key)),
        folder=example,
        spider=spider_dir,
        timeout=1200,
    )
    assert "Adapter agent match acknowledged: write" in printed  # the script's own words: it ran as it is
    summary = json.loads((example / "runs" / server / "summary.json").read_text())
    assert (summary["steps"], summary["failures"]) == (3, {})
    audited = summary["audited"]  # on a busy machine it does not look at what takes longer than a step
    assert (audited["links"] + len(audited["not_looked_at"]), audited["faults"]) == (9, [])
