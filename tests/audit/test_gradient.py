"""What a gradient's bound allows for: tokens whose ratio is at a clip limit, in bf16. And what adapters train."""

from __future__ import annotations

import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from agentrig_grpo import lora
from audited_runs import UPDATE, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from agentrig.audit import model, update
from agentrig.audit.model import Precision, Weights
from agentrig.audit.record import Call, Sources
from agentrig.audit.step import Step
from agentrig.audit.update import Update, _names

BF16 = Precision(torch.bfloat16)
PLAIN = Precision(torch.float32, rounded=torch.bfloat16)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    torch.set_num_threads(1)
    return Weights(directory=tiny_model(tmp_path_factory.mktemp("tiny")), trained={})


def calls_at_the_limit(weights: Weights, seed: int) -> tuple[list[Call], dict[str, float]]:
    """Calls most of whose tokens are clipped, and the others at the limit: up to what bf16 rounds."""
    rng, plain = random.Random(seed), weights.load(PLAIN)
    advantages = {f"r{i}": rng.choice((-1.0, 1.0)) for i in range(12)}
    found = []
    for rollout, advantage in advantages.items():
        prompt, reply = ([rng.randrange(20, 60) for _ in range(n)] for n in (6, 8))
        more: dict[str, Any] = {"rollout": rollout, "span": "s", "request": {}, "response": {}, "version": 0}
        call = Call(prompt=prompt, reply=reply, logprobs=None, **more)
        with torch.no_grad():
            now = update.logprobs(plain, [call], 1.0)
        limit = math.log(1.28) if advantage > 0 else math.log(0.8)
        beyond = [0.3 if rng.random() < 0.9 else rng.gauss(0, 0.003) for _ in reply]
        logprobs = [float(p) - limit - b * advantage for p, b in zip(now, beyond, strict=True)]
        found.append(Call(prompt=prompt, reply=reply, logprobs=logprobs, **more))
    return found, {(rollout, "s"): advantage for rollout, advantage in advantages.items()}


def largest(weights: Weights, seed: int) -> float:
    """Return the largest share of its bound by which the gradient of a learner in bf16 is off."""
    calls, advantages = calls_at_the_limit(weights, seed)

    whole = Weights(directory=weights.directory, trained=dict(weights.load(PLAIN).named_parameters()))
    same = Update(settings=UPDATE, calls=calls, advantages=advantages, weights=whole, begin=whole)
    learner = update.repeat(same, (BF16, BF16), seed=0)
    auditor = update.repeat(same, (PLAIN, BF16), seed=seed)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in auditor.total.values()))
    shares = []
    for name, wanted in auditor.total.items():
        bound = auditor.bounds[name] + update.FLOOR * norm + update.HALF * float(wanted.norm())
        shares.append(abs(float(learner.total[name].norm()) - float(wanted.norm())) / bound)
    return max(shares)


@pytest.mark.slow
def test_a_token_at_a_clip_limit_is_no_fault(weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "AT_ONCE", 1)
    monkeypatch.setattr(update, "MEASURED", 4 * 14)  # the batches that are measured need not be those with such a token
    with_clips = [largest(weights, seed) for seed in range(12)]
    monkeypatch.setattr(update, "AT_THE_CLIP", 0.0)
    without = [largest(weights, seed) for seed in range(12)]
    assert max(with_clips) < 1, with_clips
    assert max(without) > 1, without


@pytest.mark.parametrize(
    ("kind", "targets"),
    [("gpt2", "all-linear"), ("gpt2", "c_attn, c_proj"), ("llama", "all-linear"), ("llama", "embed_tokens,v_proj")],
)
def test_which_tensors_adapters_train_and_what_they_merge_to_is_known_without_peft(
    kind: str, targets: str, tmp_path: Path
) -> None:
    sizes = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32}
    config = AutoConfig.for_model(kind, **sizes, **({} if kind == "gpt2" else {"intermediate_size": 48}))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    settings = {"lora_rank": 4, "lora_targets": targets}
    step = SimpleNamespace(record=SimpleNamespace(model=tmp_path), settings=settings)
    wrapped = lora.wrap(plain, rank=4, alpha=8, targets=targets)
    trained = {name: torch.randn_like(p) for name, p in wrapped.named_parameters() if p.requires_grad}
    assert not list(_names(step, trained.keys()))
    lost = next(iter(trained))
    (said,) = _names(step, trained.keys() - {lost})
    assert said.result == "fault"
    assert said.detail.endswith(f"are not trained: {lost}")
    if "embed" in targets:  # the auditor does not merge these
        return
    for name, tensor in trained.items():
        wrapped.get_parameter(name).data.copy_(tensor)
    found = Weights(directory=tmp_path, trained=trained, scaling=2.0).load(
        Precision(torch.float32, rounded=torch.float32)
    )
    for name, tensor in lora.MergedWeights(wrapped).items():
        torch.testing.assert_close(dict(found.state_dict())[name], tensor)


@pytest.mark.parametrize(
    ("digests", "merged", "rounded", "other"),
    [
        ({"dtype": "bfloat16"}, True, torch.bfloat16, BF16),  # a server whose weights have the adapters in them
        ({"dtype": "bfloat16", "merged": False}, True, None, BF16),  # one that computes with both
        ({"dtype": "bfloat16"}, False, None, Precision(torch.float32, cast=True)),  # the learner
    ],
)
def test_adapters_are_merged_and_rounded_where_the_server_computed_so(digests, merged, rounded, other) -> None:
    record: Any = SimpleNamespace(settings={"lora_rank": 2}, lines={3: {"digests": digests}})
    step = Step(record=record, number=3, sources=Sources(splits={}, score=None))
    assert step.precisions("cpu", merged=merged) == (Precision(torch.float32, rounded=rounded), other)
