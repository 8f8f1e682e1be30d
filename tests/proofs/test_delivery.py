"""Delivery: what was trained is what answers. Healthy runs raise nothing; planted faults are named."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from agentrig_agent_match import AgentMatch
from agentrig_grpo import checkpoint
from agentrig_grpo.server import transfer
from agentrig_grpo.server.handle import LLMServer
from attrs import evolve
from delivery_faults import FAULTS, Fault
from proof_runs import ProofSession, run, tiny

from agentrig.errors import RunStopped

MODELS = tiny()
QUICK = ("the swap is skipped, the version is not", "the adapter is merged twice", "the prefix cache is stale",
         "the log-probabilities are shifted by a token")  # fmt: skip


def quick_first(names: Iterable[str], quick: Collection[str]) -> list[Any]:
    """Return the parameters of a test, those that are not quick with the mark `slow`."""
    return [pytest.param(name, id=name, marks=() if name in quick else pytest.mark.slow) for name in names]


def saved(folder: Path, kind: str = "qwen2", **more: Any) -> Path:
    torch.set_num_threads(1)
    if kind == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        sizes = {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
        model = GPT2LMHeadModel(GPT2Config(**sizes, eos_token_id=1, bos_token_id=1, initializer_range=0.2)).eval()
    else:
        model = MODELS.make_model(kind, **more)
    checkpoint.save(model, MODELS.make_tokenizer(), folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("tiny"))


def plant(fault: Fault, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a fault where it belongs: in this process, or at the start of the server's."""
    code = textwrap.dedent(fault.code)
    if fault.where == "server":
        (folder / "planted").mkdir()
        (folder / "planted" / "sitecustomize.py").write_text(code, "utf-8")
        monkeypatch.setenv("PYTHONPATH", str(folder / "planted"))
        return
    for owner, name in ((LLMServer, "swap"), (checkpoint, "weights"), (transfer, "pack")):
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


def test_at_least_five_faults_of_each_stage_are_planted() -> None:
    for stage in ("transfer", "sampling", "adapting"):
        assert sum(fault.stage == stage for fault in FAULTS.values()) >= 5


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


@pytest.mark.parametrize("name", quick_first(HEALTHY, ("qwen2, tied", "adapters")))
def test_a_healthy_run_is_proven_at_each_transfer_and_raises_nothing(name: str, tmp_path: Path) -> None:
    shape, settings = HEALTHY[name]
    session = run(tmp_path / "run", saved(tmp_path, **shape), **settings)
    summary = session.delivery.record.summary()
    transfers = 1 + len(session.steps) + (name == "the best weights at the end")
    assert (summary["proofs"], summary["arrived"]) == (transfers, transfers)
    assert summary["difference"] < summary["bound"] / 2, summary
    assert summary["calls_difference"] < summary["calls_bound"] / 2, summary
    assert summary["tensors"] > 20
    assert summary["notes"] == []
    assert [line["delivery"]["version"] for line in session.steps] == list(range(1, len(session.steps) + 1))
    assert (tmp_path / "run" / "probe.json").is_file()
