"""Replay of `grpo` on the CPU: the new weights are equal bit for bit, and each planted fault is named."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from agentrig_grpo import algorithm as grpo
from agentrig_grpo import learner

from agentrig.algorithms import WeightDifference
from agentrig.errors import AgentrigError, CheckpointDamaged
from agentrig.plan import resolve
from agentrig.run import checkpoints
from agentrig.run.replay import Replay, replay
from agentrig.run.resume import recorded_plan, resume_plan
from agentrig.run.stages import compare
from agentrig.run.training import train

PLUGIN = """
import agentrig
import httpx
from agentrig import AgentFailure, AgentSpec, RewardSpec, Score, Task, TasksSpec, hookimpl

calls = []


class Words:
    splits = ("train", "test")
    roles = {"train": "train", "report": "test"}

    def load(self, split):
        return [Task(id=f"{split}-{i}", input={"text": "count the tables " * i}) for i in range(1, 6)]


def agent(given, endpoint):
    calls.append(given)
    if len(calls) % 7 == 0:
        raise AgentFailure("the seventh", kind="seventh")
    body = {"model": endpoint.model, "messages": [{"role": "user", "content": given["text"]}], **endpoint.sampling}
    headers = {"Authorization": f"Bearer {endpoint.api_key}", **endpoint.headers}
    with agentrig.span("speak"):
        reply = httpx.post(f"{endpoint.base_url}/chat/completions", json=body, headers=headers, timeout=60)
        reply.raise_for_status()
    return reply.json()["choices"][0]["message"]["content"]


def letters(task, outcome, budget_s):
    text = str(outcome.answer)
    return Score.ok(sum("a" <= c <= "m" for c in text) / max(len(text), 1))


@hookimpl
def register_tasks():
    yield TasksSpec(name="words", summary="A few words.", build=lambda config: Words())


@hookimpl
def register_agents():
    yield AgentSpec(name="speaker", summary="One call; each seventh rollout fails.", build=lambda config: agent)


@hookimpl
def register_rewards():
    yield RewardSpec(name="letters", summary="The share of letters a to m.", build=lambda config: letters)
"""

SETTINGS = (
    "adapter.match=speak", "algorithm.model=mini", "algorithm.tasks_per_step=3", "algorithm.group_size=4",
    "algorithm.warmup_steps=0",
    "algorithm.max_tokens=8", "algorithm.temperature=1.5", "algorithm.lr=1e-4", "algorithm.validate_every=0",
    "algorithm.save_every=1", "algorithm.keep_every=1", "algorithm.ppo_epochs=2", "algorithm.mini_batches=2",
    "hardware.threads=1", "runners.n=1", "run.failure_limit=0.5", "run.report_tasks=1",
)  # fmt: skip
USES = {"tasks": "words", "agent": "speaker", "reward": "letters", "adapter": "agent-match", "algorithm": "grpo"}


def trained(folder: Path, *more: str) -> Path:
    (folder / "speaker.py").write_text(PLUGIN)
    own = [f"run.directory={folder}", "run.name=run", 'run.block=["report"]']
    plan = resolve(
        None, overrides=[*own, *SETTINGS, *more], uses={**USES, "hardware": "cpu"}, files=[str(folder / "speaker.py")]
    )
    train(plan)
    return folder / "run"


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps on all weights, and two more after a resume."""
    run = trained(tmp_path_factory.mktemp("full"), "algorithm.steps=2")
    train(resume_plan(run, overrides=["algorithm.steps=4"]), resume=run)
    return run


@pytest.fixture
def run(full: Path, tmp_path: Path) -> Path:
    """A copy, to be changed."""
    shutil.copytree(full, tmp_path / "copy")
    return tmp_path / "copy"


def repeated(run: Path, step: int, *overrides: str, **more: bool) -> Replay:
    return replay(recorded_plan(run, overrides=overrides), run, step, **more)


def results(found: Replay) -> dict[str, str]:
    return {stage.name: stage.result for stage in found.stages}


def first(found: Replay) -> tuple[str, str]:
    assert found.first_difference is not None, found
    return found.first_difference.name, found.first_difference.detail


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]


def sealed(run: Path, folder: Path) -> None:
    """Write a checkpoint's list of files and its digest again, as if the run had saved what is there now."""
    files = [f for f in sorted(folder.rglob("*")) if f.is_file() and f.name not in (checkpoints.LIST, "keep")]
    listed = {str(f.relative_to(folder)): [f.stat().st_size, checkpoints.digest_of(f)] for f in files}
    (folder / checkpoints.LIST).write_text(json.dumps(listed))
    progress = json.loads((run / "progress.json").read_text())
    progress["checkpoints"][folder.name] = [checkpoints.digest_of(folder / checkpoints.LIST)]
    (run / "progress.json").write_text(json.dumps(progress))


def test_every_step_is_the_same_bit_for_bit_before_and_after_a_resume(full: Path) -> None:
    failed = sum(sum(line["failures"].values()) for line in lines_of(full))
    assert failed >= 4, "some rollouts have failed"
    for step in range(1, 5):
        found = repeated(full, step, rescore=True)
        assert found.inexact == []
        assert set(results(found).values()) == {"ok"}, found
        assert found.stages[-1].detail == "6 groups of tensors, the same bit for bit"


@pytest.mark.slow
def test_another_process_gets_the_same_bits(full: Path) -> None:
    words = [sys.executable, "-m", "agentrig", "replay", str(full), "--step", "4", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["bit_for_bit_expected"]
    assert {stage["result"] for stage in found["stages"]} == {"ok"}


@pytest.mark.slow
def test_lora_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    run = trained(tmp_path, "algorithm.steps=2", "algorithm.lora_rank=4", "algorithm.kl_loss_coef=0.01")
    for step in (1, 2):
        found = repeated(run, step)
        assert set(results(found).values()) == {"ok"}, found
        assert found.inexact == []


def test_another_learning_rate_in_the_configuration_is_named(run: Path) -> None:
    file = run / "config.toml"
    text = file.read_text()
    assert "lr = 0.0001" in text
    file.write_text(text.replace("lr = 0.0001", "lr = 0.0002"))
    found = repeated(run, 3)
    name, detail = first(found)
    assert name == "figures"
    assert "lr 0.0001 recorded, 0.0002 now" in detail
    assert results(found)["weights"] == "differs"
    assert results(found)["batches"] == "ok"
    assert "algorithm.lr is 0.0002; the run's manifest says 0.0001" in found.notes


def test_a_wrong_sign_in_the_loss_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = learner.token_losses

    def wrong(logprobs: Any, behaviour: Any, advantage: Any, **more: Any) -> Any:
        return right(logprobs, behaviour, -advantage, **more)

    monkeypatch.setattr(learner, "token_losses", wrong)
    found = repeated(run, 2)
    name, detail = first(found)
    assert name == "figures"
    assert detail.startswith("loss ")
    assert results(found)["batches"] == "ok"
    assert results(found)["weights"] == "differs"


def test_other_advantages_are_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = grpo.group_advantages
    monkeypatch.setattr(grpo, "group_advantages", lambda *given, **more: [a and 2 * a for a in right(*given, **more)])
    found = repeated(run, 2)
    assert first(found)[0] == "advantages"
    assert results(found)["samples"] == "ok"


def test_a_sample_that_gets_lost_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = grpo.Grpo.samples

    def without_one(self: Any, rollouts: Any) -> Any:
        samples = right(self, rollouts)
        samples.remove(next(s for s in samples if s.advantage))
        return samples

    monkeypatch.setattr(grpo.Grpo, "samples", without_one)
    found = repeated(run, 2)
    assert first(found)[0] == "advantages", "its rollout has no advantage any more"
    assert {results(found)[name] for name in ("samples", "batches", "weights")} == {"differs"}


def test_another_order_of_mini_batches_is_named(run: Path) -> None:
    found = repeated(run, 2, "algorithm.mini_batches=1")
    assert first(found)[0] == "batches"
    assert results(found)["samples"] == "ok"


def test_a_changed_checkpoint_is_named_with_what_the_step_began_with(run: Path) -> None:
    file = run / "checkpoints" / "step-00002" / "trainer" / "learner.pt"
    state = torch.load(file, weights_only=True)
    state["optimizer"]["state"][0]["exp_avg"].view(-1)[5] += 1e-6
    torch.save(state, file)
    with pytest.raises(CheckpointDamaged, match=r"trainer/learner\.pt has changed since it was saved"):
        repeated(run, 3)
    sealed(run, file.parents[1])
    assert first(repeated(run, 3))[0] == "start", "its own digest tells it, if the list of files does not"


def test_other_weights_are_named_by_their_groups(run: Path) -> None:
    lines = lines_of(run)
    lines[2]["digests"]["weights"]["model.layers.1"] = "0" * 32
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    name, detail = first(repeated(run, 3))
    assert name == "weights"
    assert detail.startswith("1 of 6 groups of tensors differ: model.layers.1")


@pytest.mark.slow
def test_an_algorithm_without_a_replay_of_its_own_is_run_for_one_step(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(grpo.Grpo, "replay")
    lines = lines_of(run)
    for line in lines:
        del line["digests"]["weights"]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = repeated(run, 3)
    assert set(results(found).values()) == {"ok"}
    assert found.stages[-1].detail == "the same bit for bit as the checkpoint's", "its files are compared"
    assert first(repeated(run, 3, "algorithm.lr=2e-4"))[0] == "figures"


def test_a_missing_starting_model_is_named(run: Path) -> None:
    with pytest.raises(AgentrigError, match="nowhere"):
        repeated(run, 1, "algorithm.model=/nowhere")


@pytest.mark.slow
def test_another_number_of_threads_is_reported_and_compared_within_a_bound(run: Path) -> None:
    found = repeated(run, 3, "hardware.threads=2")
    assert found.inexact == ["threads was 1 and is 2"]
    assert found.first_difference is None
    torch.set_num_threads(1)


def test_a_run_without_digests_is_compared_with_its_checkpoint(run: Path) -> None:
    lines = lines_of(run)
    for line in lines:
        del line["digests"]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = repeated(run, 3)
    assert found.first_difference is None
    assert found.stages[-1].detail == "the same bit for bit as the checkpoint's"
    shutil.rmtree(run / "checkpoints" / "step-00003")
    assert results(repeated(run, 3))["weights"] == "not compared"


LINE = {"algorithm": {"loss": 1.0, "tokens_s": 5.0}, "digests": {"weights": {"a": "1", "b": "2"}}}


def weights_stage(now: dict[str, str], difference: WeightDifference | None, *, exact: bool) -> tuple[str, str]:
    repeated = {"algorithm": {"loss": 1.0}, "digests": {"rewards": "", "triplets": "", "weights": now}}
    stages = compare(LINE, repeated, rows=[], rollouts=[], requested="", exact=exact, difference=difference)
    return stages[-1].result, stages[-1].detail


def test_weights_are_compared_within_a_bound_where_bits_may_differ() -> None:
    other, near = {"a": "1", "b": "3"}, WeightDifference(largest=1e-6, relative=0.01, digests={"a": "1", "b": "2"})
    assert weights_stage({"a": "1", "b": "2"}, None, exact=False)[0] == "ok"
    assert weights_stage(other, near, exact=False)[0] == "ok"
    assert weights_stage(other, near, exact=True)[0] == "differs"
    assert weights_stage(other, attrs.evolve(near, relative=0.5), exact=False)[0] == "differs"
    assert (
        weights_stage(other, attrs.evolve(near, relative=float("nan"), largest=float("nan")), exact=False)[0]
        == "differs"
    )
    best = attrs.evolve(near, digests={"a": "9", "b": "9"})  # final = "best": the checkpoint holds other weights
    result, detail = weights_stage(other, best, exact=False)
    assert result == "not compared"
    assert "no checkpoint has this step's weights" in detail
