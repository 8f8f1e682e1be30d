"""The recipe `mini` end to end, for a few steps: the run directory, Ctrl-C and resume, dev, eval."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from agentrig.cli.entry import main
from agentrig.errors import RunStopped
from agentrig.plan import resolve
from agentrig.run.training import train

TINY = (
    "algorithm.tasks_per_step=8",
    "algorithm.group_size=4",
    "algorithm.validate_every=2",
    "run.validation_tasks=8",
    "run.report_tasks=16",
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
    """A run of three steps."""
    folder = tmp_path_factory.mktemp("mini")
    words = command("train", "mini", "algorithm.steps=3", "run.name=a", "run.second_reward=spider-exec-strict", *TINY)
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs" / "a"


def test_the_run_directory_is_complete(finished: Path) -> None:
    for name in ("config.toml", "manifest.json", "metrics.jsonl", "report.html", "summary.json"):
        assert (finished / name).is_file(), name
    assert list((finished / "plots").glob("*.png"))
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["accuracy"]["n"] == 16
    assert 0 <= summary["accuracy"]["before"] <= 1
    assert 0 <= summary["accuracy"]["after"] <= 1
    assert summary["train_rollouts"] == 3 * 8 * 4
    assert summary["failures"] == {}
    assert 0.5 < sum(summary["time_share"].values()) <= 1.01
    assert summary["transitions_per_rollout"] >= 1
    assert summary["prompt_tokens"] > 10
    assert summary["response_tokens"] > 3


def test_every_step_trains_on_its_rollouts(finished: Path) -> None:
    import pyarrow.parquet as pq

    lines = lines_of(finished)
    assert [line["step"] for line in lines] == [1, 2, 3]
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


def test_no_gold_answer_is_in_any_rollout(finished: Path) -> None:
    import pyarrow.parquet as pq

    for file in (finished / "rollouts").glob("*.parquet"):
        table = pq.read_table(file)
        assert "private" not in table.column_names
        for spans in table.column("spans").to_pylist():
            assert '"gold"' not in spans


def test_the_checkpoint_is_a_model_that_transformers_loads_and_eval_measures(finished: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint = finished / "checkpoints" / (finished / "checkpoints/latest").read_text().strip()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert len(tokenizer) <= model.get_input_embeddings().weight.shape[0]
    done = in_this_process("eval", "mini", "--checkpoint", str(finished), "--limit", "16", "--json")
    found = json.loads(done.stdout)
    summary = json.loads((finished / "summary.json").read_text())
    assert found["n"] == 16
    assert found["accuracy"] == pytest.approx(summary["accuracy"]["after"], abs=1 / 16)
    assert found["ci95"][0] <= found["accuracy"] <= found["ci95"][1]


@pytest.mark.slow
def test_ctrl_c_keeps_a_checkpoint_and_the_run_resumes(tmp_path: Path) -> None:
    words = command("train", "mini", "algorithm.steps=4", "run.name=c", *TINY)
    process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    run = tmp_path / "runs" / "c"
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and not (run / "metrics.jsonl").exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert "--resume" in output
    done = len(lines_of(run))
    assert done < 4
    checkpoint = (run / "checkpoints/latest").read_text().strip()
    assert checkpoint == f"step-{done:05d}"
    before = json.loads((run / "summary.json").read_text())["accuracy"]["before"]
    in_this_process("train", "--resume", str(run))
    assert [line["step"] for line in lines_of(run)] == [1, 2, 3, 4]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 4
    assert summary["accuracy"]["before"] == before
    assert summary["accuracy"]["after"] is not None


@pytest.mark.slow
def test_gradients_that_are_not_finite_end_a_run_at_the_second_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from agentrig_grpo import learner

    class Poisoned(learner.Learner):
        def update(self, samples: Any, *, step: int, **more: Any) -> Any:
            if step >= 2:
                next(iter(self.trained.values())).register_hook(lambda gradient: gradient * float("nan"))
            return super().update(samples, step=step, **more)

    monkeypatch.setattr(learner, "Learner", Poisoned)
    overrides = [f"run.directory={tmp_path}/runs", "run.name=a", "algorithm.steps=5", "hardware.use=cpu", *TINY]
    with pytest.raises(RunStopped, match="steps 2 and 3: grad_norm nan: updates with such gradients"):
        train(resolve("mini", overrides=overrides))
    assert "step 2: grad_norm nan; the run stops if that happens again in the next step" in caplog.text
    lines = lines_of(tmp_path / "runs" / "a")
    assert [line["algorithm"]["weight_change"] > 0 for line in lines] == [True, False, False]
