"""The recipe `mini` end to end, for a few steps: the run directory, Ctrl-C and resume, dev, eval."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from agentrig.cli.entry import main

TINY = (
    "algorithm.tasks_per_step=8",
    "algorithm.group_size=4",
    "algorithm.validate_every=2",
    "run.validation_tasks=4",
    "run.report_tasks=8",
    "hardware.threads=1",  # torch's threads wait by spinning
)


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "agentrig", *words]


def in_this_process(*words: str) -> Result:
    """Run a command here, where torch and transformers are imported once; its servers and runners are processes."""
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    return done


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mini")
    words = command("train", "mini", "algorithm.steps=2", "run.name=a", "run.second_reward=spider-exec-strict", *TINY)
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "stderr.txt").write_text(done.stderr)
    return folder / "runs" / "a"


def test_the_default_recipe_has_nothing_to_warn_of(finished: Path) -> None:
    said = (finished.parents[1] / "stderr.txt").read_text()
    assert "INFO agentrig.run.auditing: checked step 1" in said
    assert "warning" not in said.lower()


def test_every_step_trains_on_its_rollouts(finished: Path) -> None:
    import pyarrow.parquet as pq

    lines = lines_of(finished)
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        rows = pq.read_table(finished / "rollouts" / f"train-{line['step']:05d}.parquet").to_pylist()
        assert len(rows) == line["rollouts"] == 32
        assert line["algorithm"]["weight_change"] > 0
        trained = sum(r["triplets"] for r in rows)
        assert trained == sum(line["nodes"]["trained"].values())
        assert set(line["nodes"]["trained"]) <= {"write_query", "rewrite_query"}
        assert "check_query" in line["nodes"]["seen"]
        assert "spider-exec-strict" in line["second_rewards"]
        values = [r["value"] for r in rows if r["value"] is not None]
        assert line["reward"] == pytest.approx(sum(values) / len(values))


def test_the_checkpoint_is_a_model_that_transformers_loads_and_eval_measures(finished: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint = finished / "checkpoints" / (finished / "checkpoints/latest").read_text().strip()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert len(tokenizer) <= model.get_input_embeddings().weight.shape[0]
    done = in_this_process("eval", "mini", "--checkpoint", str(finished), "--limit", "8", "--json")
    found = json.loads(done.stdout)
    summary = json.loads((finished / "summary.json").read_text())
    assert found["n"] == 8
    assert found["accuracy"] == pytest.approx(summary["accuracy"]["after"], abs=1 / 8)
    assert found["ci95"][0] <= found["accuracy"] <= found["ci95"][1]
