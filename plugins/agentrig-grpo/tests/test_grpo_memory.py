"""The memory of an update is estimated before it; an update that does not fit is refused with a message."""

from __future__ import annotations

import json
import re
from functools import partial
from types import SimpleNamespace

import attrs
import pytest
import torch
from agentrig_grpo import fitting
from agentrig_grpo.config import GrpoConfig
from agentrig_grpo.fitting import free_memory, plan_memory
from agentrig_grpo.learner import Learner
from agentrig_grpo.memory import GIB, Counter, _full, need_of
from quick import quick_first

from agentrig.errors import ConfigError, RunStopped
from agentrig.forest.scoring import CHUNK

LARGE = {"vocab": 4000, "hidden": 128, "layers": 4}
"""Activations that outweigh the state."""


@pytest.fixture(scope="module")
def directory(make_model, tokenizer, tmp_path_factory):
    from agentrig_grpo import checkpoint

    path = tmp_path_factory.mktemp("large")
    checkpoint.save(make_model(**LARGE), tokenizer, path)
    return path


def measured(model, config, dtype, chunk, recomputed=None):
    """Return the most bytes of tensors that were alive in a real update of two passes, in the second step."""
    learner = Learner(model, config, dtype=dtype, seed=0, chunk=chunk, recomputed=recomputed)
    samples = [attrs.evolve(s, prompt_ids=[first, *s.prompt_ids[1:]]) for first in (8, 9) for s in _full(config)]
    learner.update(samples, step=1)
    with Counter("cpu") as counter:
        counter.add(iter([p.data for p in (*learner.trained.values(), *learner.model.parameters())]))
        counter.add(t for state in learner.optimizer.state.values() for t in state.values())
        if learner._reference is not None:
            counter.add(p.data for p in learner._reference.parameters())
        learner.update(samples, step=2)
    return counter.peak


WAYS = {
    "fp32": ("float32", {}, CHUNK),
    "checkpointing": ("float32", {"gradient_checkpointing": True}, CHUNK),
    "chunks of logits": ("float32", {}, 4000 * 64),
    "bf16": ("bfloat16", {}, CHUNK),
    "bf16, checkpointing": ("bfloat16", {"gradient_checkpointing": True}, CHUNK),
    "adapters": ("float32", {"lora_rank": 4}, CHUNK),
    "adapters in bf16": ("bfloat16", {"lora_rank": 4}, CHUNK),
    "a reference": ("float32", {"kl_loss_coef": 0.1}, CHUNK),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_the_estimate_is_what_an_update_holds(make_model, directory, way) -> None:
    dtype, more, chunk = WAYS[way]
    config = GrpoConfig(tokens_per_batch=1024, group_size=4, max_tokens=100, **more)
    need = need_of(directory, config, dtype=dtype, device="cpu", attention="sdpa", chunk=chunk)
    real = measured(make_model(**LARGE), config, dtype, chunk)
    assert need.peak == pytest.approx(real, rel=0.05)


@pytest.mark.slow
def test_the_estimate_of_adapters_knows_a_model_that_stays_in_16_bits(make_model, tokenizer, tmp_path) -> None:
    from agentrig_grpo import checkpoint

    checkpoint.save(make_model(**LARGE), tokenizer, tmp_path, dtype=torch.bfloat16)
    config = GrpoConfig(tokens_per_batch=1024, group_size=4, max_tokens=100, lora_rank=4)
    need = need_of(tmp_path, config, dtype="bfloat16", device="cpu", attention="sdpa", chunk=CHUNK)
    real = measured(make_model(**LARGE).to(torch.bfloat16), config, "bfloat16", CHUNK)
    assert need.peak == pytest.approx(real, rel=0.05)
    held = sum(p.numel() for p in make_model(**LARGE).parameters())
    assert 2 * held < need.weights < 3 * held


def weights_of(directory):
    """Return the bytes that are left to the model's server on a CPU."""
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def fit(directory, free, monkeypatch, **settings):
    monkeypatch.setattr(fitting, "free_memory", lambda device: free)
    config = GrpoConfig(group_size=4, max_tokens=100, **{"tokens_per_batch": 4096, **settings})
    return plan_memory(directory, config, dtype="float32", device="cpu", attention="sdpa")


def test_checkpointing_is_on_only_where_memory_is_short(directory, monkeypatch) -> None:
    plenty = fit(directory, 64 * GIB, monkeypatch)
    assert (plenty.config.gradient_checkpointing, plenty.need) == (False, None)
    config = GrpoConfig(group_size=4, max_tokens=100, tokens_per_batch=4096)
    need = need_of(directory, config, dtype="float32", device="cpu", attention="sdpa", chunk=CHUNK)
    enough = fit(directory, int(need.peak * 1.3), monkeypatch)
    assert (enough.config.gradient_checkpointing, enough.need) == (False, need)
    short = fit(directory, int(need.peak * 0.9), monkeypatch)
    assert short.config.gradient_checkpointing is True
    assert short.need.peak < need.peak


@pytest.mark.slow
def test_only_as_many_layers_as_needed_compute_their_activations_twice(make_model, directory, monkeypatch) -> None:
    config = GrpoConfig(group_size=4, max_tokens=100, tokens_per_batch=1024)
    need = partial(need_of, directory, dtype="float32", device="cpu", attention="sdpa", chunk=CHUNK)
    none, every = need(config).peak, need(attrs.evolve(config, gradient_checkpointing=True)).peak
    for share, layers in ((0.6, 2), (0.02, None)):
        free = int(1.1 * (every + share * (none - every)) + weights_of(directory))
        short = fit(directory, free, monkeypatch, tokens_per_batch=1024)
        assert short.recomputed == layers
        assert short.need.peak * 1.1 <= free
    some = measured(make_model(**LARGE), attrs.evolve(config, gradient_checkpointing=True), "float32", CHUNK, 2)
    assert need(attrs.evolve(config, gradient_checkpointing=True), recomputed=2).peak == pytest.approx(some, rel=0.05)


ADVICE = {
    "recompute": (250, {"gradient_checkpointing": False}, r"Set algorithm\.gradient_checkpointing = true"),
    "batches": (90, {}, r"Set algorithm\.tokens_per_batch = (1024|2048)"),
    "optimizer": (
        26,
        {"tokens_per_batch": 256},
        r"Set algorithm\.optimizer = \"adamw8bit\" \(pip install 'agentrig-grpo\[8bit\]'\)",
    ),
    "adapters": (21, {"tokens_per_batch": 256}, r"Set algorithm\.lora_rank = 16, which trains adapters only"),
    "model": (2, {}, r"Take a smaller model, or a device with more memory"),
}


@pytest.mark.parametrize("name", quick_first(ADVICE, ("batches",)))
def test_an_update_that_does_not_fit_is_refused_with_advice(directory, monkeypatch, name) -> None:
    mib, settings, cure = ADVICE[name]
    words = rf"an update needs about [\d.]+ [GM]iB of memory, and [\d.]+ [GM]iB of cpu are free for it; .*\n  {cure}$"
    with pytest.raises(ConfigError, match=re.compile(words, re.DOTALL)) as error:
        fit(directory, mib << 20, monkeypatch, **settings)
    said = re.search(r"Set algorithm\.(\w+) = (\S+?)[ ,]?(\n|,| |$)", str(error.value))
    if said:  # it keeps its word
        fit(directory, mib << 20, monkeypatch, **{**settings, said[1]: json.loads(said[2])})


def test_free_memory_is_that_of_this_host() -> None:
    assert 1 << 24 < free_memory("cpu") < 1 << 50


def test_a_model_whose_calls_share_no_tokens_is_not_estimated(make_model, tokenizer, tmp_path, monkeypatch, caplog):
    from agentrig_grpo import checkpoint

    checkpoint.save(make_model("gpt2", n_embd=32, n_layer=2, n_head=4, n_positions=64), tokenizer, tmp_path)
    found = fit(tmp_path, 64 * GIB, monkeypatch)
    assert (found.need, found.config.gradient_checkpointing) == (None, False)
    words = (
        "how much memory an update needs is not known before the first one: NotImplementedError: the calls of a gpt2"
    )
    assert words in caplog.text


def test_an_estimate_that_fails_does_not_stop_a_run(directory, monkeypatch, caplog) -> None:
    def broken(*_, **__):
        raise RuntimeError("an operation without fake tensors")

    monkeypatch.setattr(fitting, "need_of", broken)
    found = fit(directory, 200 << 20, monkeypatch)
    assert (found.need, found.config.gradient_checkpointing, found.chunk) == (None, False, CHUNK)
    assert "RuntimeError: an operation without fake tensors. Gradient checkpointing is off" in caplog.text


def test_a_server_that_has_started_is_not_counted_twice(monkeypatch) -> None:
    """80 GiB, of which a server takes 32: before it starts, and when it has 2, 32 or 40 GiB and this process 1."""
    for used, asleep, left in ((0, False, 47), (2, False, 47), (32, False, 47), (40, False, 39), (40, True, 47)):
        device = SimpleNamespace(
            mem_get_info=lambda used=used: ((79 - used) * GIB, 80 * GIB), memory_reserved=lambda: GIB
        )
        monkeypatch.setattr(torch, "get_device_module", lambda kind, device=device: device)
        assert fitting._left("cuda", 32 * GIB, asleep=asleep) == left * GIB


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, r"step 3: the device ran out of memory in a pass of at most 40\d tokens \(no room\)\n  Lower algorithm"),
        (
            {"tokens_per_batch": 64},
            r"A call of \d+ tokens is longer than algorithm.tokens_per_batch = 64. Set algorithm.m",
        ),
        ({"gradient_checkpointing": True}, r"tokens_per_batch = 8192$"),
        (
            {"gradient_checkpointing": False},
            r"tokens_per_batch = 8192, or set algorithm.gradient_checkpointing = true$",
        ),
    ],
)
def test_an_update_that_runs_out_of_memory_says_what_to_set(make_model, monkeypatch, settings, words) -> None:
    learner = Learner(make_model(), GrpoConfig(**settings), dtype="float32", seed=0)

    def full(*_, **__):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(learner, "_score", full)
    samples = _full(GrpoConfig(tokens_per_batch=408, group_size=2, max_tokens=100))
    with pytest.raises(RunStopped, match=words):
        learner.update(samples, step=3)
