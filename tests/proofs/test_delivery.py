"""The proof of delivery: healthy runs raise nothing, and planted faults are named."""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from agentrig_agent_match import AgentMatch
from agentrig_grpo import checkpoint
from agentrig_grpo.config import EmbeddedConfig
from agentrig_grpo.server import transfer
from agentrig_grpo.server.handle import Embedded
from attrs import evolve
from click.testing import CliRunner
from delivery_faults import FAULTS, Fault
from embedded_servers import embedded, health
from proof_runs import Backend, ProofSession, balanced, run
from quick import quick_first
from safetensors.torch import load_file, save_file

from agentrig.cli import main
from agentrig.delivery import Delivery
from agentrig.errors import RunStopped
from agentrig.run.loop import Loop
from agentrig.testing.tiny_model import make_model, make_tokenizer
from agentrig.view.diagnosis import diagnose

QUICK = ("the swap is skipped, the version is not",)


def saved(folder: Path, kind: str = "qwen2", **more: Any) -> Path:
    torch.set_num_threads(1)
    if kind == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        sizes = {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
        model = GPT2LMHeadModel(GPT2Config(**sizes, eos_token_id=1, bos_token_id=1, initializer_range=0.2)).eval()
    else:
        model = make_model(kind, **more)
    checkpoint.save(model, make_tokenizer(), folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("tiny"))


def plant(fault: Fault, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a fault in this process, or at the start of the server's process."""
    code = textwrap.dedent(fault.code)
    if fault.where == "server":
        (folder / "planted").mkdir()
        (folder / "planted" / "sitecustomize.py").write_text(code, "utf-8")
        monkeypatch.setenv("PYTHONPATH", str(folder / "planted"), prepend=os.pathsep)
        return
    for owner, name in ((Embedded, "take"), (checkpoint, "weights"), (transfer.Sender, "pack")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back after the test
    space: dict[str, Any] = {"evolve": evolve}
    exec(code, space)
    if "CHANGE" in space:
        real = AgentMatch.__call__
        monkeypatch.setattr(AgentMatch, "__call__", lambda self, trace: [space["CHANGE"](t) for t in real(self, trace)])


@pytest.mark.parametrize("name", quick_first(FAULTS, QUICK))
def test_a_silent_fault_is_named(name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(FAULTS[name], tmp_path, monkeypatch)
    session = ProofSession(tmp_path / "run")
    with pytest.raises(RunStopped) as stopped:
        run(tmp_path / "run", model, session, **FAULTS[name].settings)
    message = str(stopped.value)
    assert re.search(FAULTS[name].names, message, re.S), message
    found = re.match(r"step (\d+)", message)
    assert found is not None
    assert int(found[1]) <= FAULTS[name].step, message
    assert len(session.steps) < FAULTS[name].step


@pytest.mark.parametrize("stage", ["transfer", "sampling", "adapting"])
def test_the_table_of_faults_in_the_docs_counts_those_of_each_stage(stage: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "proofs.md").read_text("utf-8")
    assert f"| delivery, {stage} ({sum(fault.stage == stage for fault in FAULTS.values())}) |" in page


HEALTHY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2, tied": ({}, {}),
    "qwen2, not tied": ({"tie_word_embeddings": False}, {}),
    "qwen3": ({"kind": "qwen3"}, {}),
    "llama with biases": ({"kind": "llama", "attention_bias": True, "tie_word_embeddings": False}, {}),
    "gpt2, through transformers": ({"kind": "gpt2"}, {}),
    "adapters": ({}, {"lora_rank": 4}),
    "adapters of gpt2": ({"kind": "gpt2"}, {"lora_rank": 4, "lora_targets": "c_attn,c_proj"}),
    "bfloat16": ({}, {"dtype": "bfloat16"}),
    "bfloat16, deep, adapters": ({"layers": 8}, {"dtype": "bfloat16", "lora_rank": 4}),
    "another temperature, a nucleus": ({}, {"temperature": 0.7, "top_p": 0.8}),
    "gradient checkpointing": ({}, {"gradient_checkpointing": True}),
    "several updates a step": ({}, {"ppo_epochs": 2, "mini_batches": 2, "tasks_per_step": 4}),
    "a short context": ({"max_position_embeddings": 64}, {"max_length": 40}),
    "the best weights at the end": ({}, {"final": "best", "validate_every": 1, "steps": 3}),
}


@pytest.mark.parametrize("name", quick_first(HEALTHY, ()))
def test_a_healthy_run_is_proven_at_each_transfer_and_raises_nothing(name: str, tmp_path: Path) -> None:
    shape, settings = HEALTHY[name]
    session = run(tmp_path / "run", saved(tmp_path, **shape), **settings)
    summary = session.delivery.summary()
    transfers = 1 + len(session.steps) + (name == "the best weights at the end")
    assert (summary["proofs"], summary["arrived"]) == (transfers, transfers)
    assert summary["difference"] < summary["bound"] / 2, summary
    assert summary["calls_difference"] < summary["calls_bound"] / 2, summary
    assert summary["tensors"] > 20
    assert summary["notes"] == []
    sampled_with = [line["delivery"]["version"] for line in session.steps]
    assert sampled_with == list(range(len(session.steps))), "the weights that the step's rollouts were sampled with"
    assert (tmp_path / "run" / "probe.json").is_file()


# --- servers ---


def run_behind(
    monkeypatch: pytest.MonkeyPatch,
    directory: Path,
    model: Path,
    others: Sequence[Backend] = (),
    refuse: Sequence[str] = (),
    only_others: bool = False,
    **settings: Any,
) -> ProofSession:
    """Run with a real balancer in front of the run's server and others."""
    with ExitStack() as ending:
        real = Loop._sampling
        balancers: list[Any] = []

        def through(self: Loop) -> Any:
            (found,) = real(self)
            if not balancers:
                own = [] if only_others else [Backend(found.base_url, found.api_key)]
                balancers.append(ending.enter_context(balanced([*own, *others], refuse)))
            return [evolve(found, base_url=balancers[0].url)]

        monkeypatch.setattr(Loop, "_sampling", through)
        session = ProofSession(directory)
        run(directory, model, session, **settings)
        return session


@pytest.fixture(scope="module")
def old(model: Path) -> Iterator[Backend]:
    """Another server with the starting model, whose weights never change."""
    with embedded(model, name="policy", slots=8) as server:
        yield Backend(server.base_url, server.api_key)


@pytest.fixture
def replica(model: Path) -> Iterator[Embedded]:
    with embedded(model, name="policy", slots=8) as server:
        yield server


@pytest.mark.slow
def test_an_old_version_behind_a_balancer_is_named(
    model: Path, old: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RunStopped, match=r"step 1: the weights of version 1 did not arrive") as stopped:
        run_behind(monkeypatch, tmp_path / "run", model, [old])
    assert re.search(r"several servers are behind it|answers with the weights of version 0", str(stopped.value))


@pytest.mark.slow
def test_two_good_replicas_behind_one_address_raise_nothing(
    model: Path, replica: Embedded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Embedded.take

    def both(self: Embedded, weights: Any, version: int, **more: Any) -> None:
        held = list(weights)
        for each in (self, replica):
            real(each, held, version, **more)

    monkeypatch.setattr(Embedded, "take", both)
    session = run_behind(monkeypatch, tmp_path / "run", model, [Backend(replica.base_url, replica.api_key)])
    summary = session.delivery.summary()
    assert (summary["proofs"], summary["arrived"], summary["notes"]) == (3, 3, [])
    assert summary["difference"] < summary["bound"] / 2
    assert health(replica)["version"] == 2
    assert health(replica)["counts"]["tokens"] > 20, "it answered its share"


@pytest.mark.slow
def test_a_server_with_another_model_of_the_same_shape_is_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = saved(tmp_path, seed=7)
    with embedded(other, name="policy", slots=8) as server:
        backend = Backend(server.base_url, server.api_key)
        with pytest.raises(RunStopped, match=r"step 0: .*did not arrive") as stopped:
            run_behind(monkeypatch, tmp_path / "run", model, [backend], only_others=True)
    assert re.search(r"\d+ of \d+ tensors differ from the learner's: model\.", str(stopped.value))


@pytest.mark.slow
def test_the_weaker_proof_is_used_for_a_server_that_cannot_score(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    session = run_behind(monkeypatch, tmp_path / "run", model, refuse=["/completions"], steps=3)
    told = [r.getMessage() for r in caplog.records if "cannot score given tokens" in r.getMessage()]
    assert len(told) == 1, "it is reported once"
    assert "the weaker proof is used" in told[0]
    summary = session.delivery.summary()
    assert summary["notes"] == told
    assert (summary["proofs"], summary["arrived"]) == (4, 3), "the last weights were not sampled from"
    assert summary["calls_difference"] < 1e-4
    assert summary["difference"] is None


@pytest.mark.slow
def test_the_weaker_proof_names_a_skipped_swap_at_the_next_step(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(FAULTS["the swap is skipped, the version is not"], tmp_path, monkeypatch)
    with pytest.raises(RunStopped, match=r"step 2: what is trained is not what was sampled"):
        run_behind(monkeypatch, tmp_path / "run", model, refuse=["/completions"], steps=3, lr=1e-2)


# --- models and runs ---


@pytest.mark.slow
def test_a_model_with_noise_widens_the_bound_and_is_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = checkpoint.load_model

    def noisy(*given: Any, **more: Any) -> Any:
        found = real(*given, **more)
        found.model.norm.register_forward_hook(lambda module, args, out: out + 1e-4 * torch.randn_like(out))
        return found

    monkeypatch.setattr(checkpoint, "load_model", noisy)
    session = run(tmp_path / "run", model)
    summary = session.delivery.summary()
    assert summary["arrived"] == summary["proofs"] == 3
    (note,) = summary["notes"]
    assert note.startswith("the model is not deterministic: two scorings of the probe by the learner differ by")
    assert summary["bound"] > 5e-4


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 4])
def test_a_resumed_run_proves_its_first_transfer_with_the_same_probe(model: Path, tmp_path: Path, rank: int) -> None:
    first = run(tmp_path / "run", model, steps=2, lora_rank=rank)
    probe = (tmp_path / "run" / "probe.json").read_text()
    again = ProofSession(tmp_path / "run", checkpoint=first.saved[2], first_step=3)
    again.delivery = Delivery(tmp_path / "run", lines=first.steps)
    run(tmp_path / "run", model, again, steps=3, lora_rank=rank)
    assert (tmp_path / "run" / "probe.json").read_text() == probe
    summary = again.delivery.summary()
    assert summary["proofs"] == summary["arrived"] == 2 + 2, "the last one of the first launch has no line of metrics"


def test_a_run_that_starts_over_takes_no_probe_of_its_former_model(tmp_path: Path) -> None:
    (tmp_path / "probe.json").write_text('{"ids": [2001, 2002]}')
    assert Delivery(tmp_path, lines=[{"step": 1}]).probe(context=64, prompt=lambda: [7]) == [2001, 2002]
    assert Delivery(tmp_path).probe(context=64, prompt=lambda: [7]) == [7]


@pytest.mark.slow
def test_a_resumed_server_with_other_weights_is_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(tmp_path / "run", model)
    plant(FAULTS["the swap is skipped, the version is not"], tmp_path, monkeypatch)
    again = ProofSession(tmp_path / "run", checkpoint=first.saved[1], first_step=2)
    again.make = lambda plan: Embedded(EmbeddedConfig(batch=8), evolve(plan, model=first.saved[2]))
    with pytest.raises(RunStopped, match=r"step 1: the weights of version 1 did not arrive"):
        run(tmp_path / "run", model, again, steps=3)


@pytest.mark.slow
def test_the_proof_can_be_turned_off(model: Path, tmp_path: Path) -> None:
    session = ProofSession(tmp_path / "run")
    session.delivery = Delivery(tmp_path / "run", on=False)
    run(tmp_path / "run", model, session)
    summary = session.delivery.summary()
    assert (summary["on"], summary["proofs"]) == (False, 0)
    assert not (tmp_path / "run" / "probe.json").exists()
    assert not (session.saved[2] / "trainer" / "delivery.json").exists()


# --- export ---


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"lora_rank": 4}, {"dtype": "bfloat16"}], ids=str)
def test_an_export_answers_as_the_learner_did(model: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    session = run(tmp_path / "run", model, **settings)
    source = session.saved[2]
    done = CliRunner().invoke(main, ["export", str(source), str(tmp_path / "model")])
    assert done.exit_code == 0, done.output
    assert "it answers as the learner did after step 2: largest difference" in done.output
    assert f"as the model {tmp_path / 'model'}: vllm serve {tmp_path / 'model'}" in done.output
    assert f"then transformers serve {tmp_path / 'model'} --port 8000" in done.output

    (file,) = source.glob("*model.safetensors")
    weights = load_file(str(file))
    name = next(name for name in weights if "layers.1.mlp.up_proj" in name and ".lora_A" not in name)
    weights[name] = weights[name].flip(0).contiguous()
    save_file(weights, str(file), metadata={"format": "pt"})
    done = CliRunner().invoke(main, ["export", str(source), str(tmp_path / "other")])
    assert done.exit_code == 1
    assert "is not the model that was trained" in done.output
    done = CliRunner().invoke(main, ["export", "--no-check", str(source), str(tmp_path / "unchecked")])
    assert done.exit_code == 0, done.output


# --- the report ---


@pytest.mark.parametrize(
    ("seen", "level", "text"),
    [
        (
            {"on": True, "proofs": 52, "arrived": 52, "difference": 3e-6, "bound": 9e-5, "tensors": 26},
            *("ok", "new weights 52 of 52 times: log-probabilities differ by at most 3e-06 (bound 9e-05), 26 tensors"),
        ),
        ({"on": True, "proofs": 2, "arrived": 1}, "warn", "new weights 1 of 2 times"),
        ({"on": True, "proofs": 0}, "warn", "arrived at the model's server: apo has no learner that could be asked"),
        ({"on": False, "proofs": 0}, "warn", "arrived: run.delivery is false"),
    ],
)
def test_the_report_has_a_line_about_delivery(seen: dict[str, Any], level: str, text: str, tmp_path: Path) -> None:
    files = {"summary.json": {"delivery": seen}, "manifest.json": {"components": {"algorithm": {"name": "apo"}}}}
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content), "utf-8")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "algorithm": {}}) + "\n", "utf-8")
    found = diagnose(tmp_path)
    (line,) = [f for f in (*found.warnings, *found.checks) if "new weights" in f.text or "arrived" in f.text]
    assert (line.level, text in line.text) == (level, True)
