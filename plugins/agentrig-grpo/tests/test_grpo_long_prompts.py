"""Prompts and answers of every length, through sampling, learning and new weights, compared with transformers."""

from __future__ import annotations

import random

import pytest
import torch
from agentrig_grpo import checkpoint
from agentrig_grpo.config import GrpoConfig
from agentrig_grpo.learner import Learner, TrainSample
from agentrig_grpo.server.decoder import LlamaDecoder
from agentrig_grpo.server.engine import Engine, Request
from agentrig_grpo.server.fallback import TransformersDecoder
from agentrig_grpo.server.loading import build_decoder

FAMILIES = {
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "llama": {"attention_bias": True},
    # Takes the fallback; one layer of two looks back no further than its window.
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 128,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
CONTEXT = 6600
FP32, BF16 = torch.float32, torch.bfloat16


def logprobs_of(model, request):
    """Return log-probabilities of a request's tokens by transformers, all in one pass without a cache."""
    ids = torch.tensor([[*request.prompt, *request.tokens]])
    with torch.no_grad():
        logits = model(ids, logits_to_keep=len(request.tokens) + 1).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(request.tokens)[:, None])[:, 0]


def rms(differences):
    return float(torch.cat(differences).square().mean().sqrt())


def assert_sampled_as_by_transformers(requests, model, exact):
    """Compare with transformers in the same dtype; `exact` computes the same weights in fp32."""
    ours = [torch.tensor(r.logprobs) for r in requests]
    theirs = [logprobs_of(model, r) for r in requests]
    if model.dtype == FP32:
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=1e-3, rtol=0)
        assert rms([a - b for a, b in zip(ours, theirs, strict=True)]) < 5e-5
        return
    # In bf16 each of the two rounds in different places: neither may be further from the exact result than the other.
    truth = [logprobs_of(exact, r) for r in requests]
    theirs_off = rms([b - c for b, c in zip(theirs, truth, strict=True)])
    assert rms([a - c for a, c in zip(ours, truth, strict=True)]) < 1.5 * theirs_off
    assert max(float((a - c).abs().max()) for a, c in zip(ours, truth, strict=True)) < 20 * theirs_off


def train(make_model, tokenizer, directory, family, dtype, prompts, answers):
    """Sample, compare, learn and swap three times; every prompt is answered once in each of the lengths."""
    settings = {"max_position_embeddings": CONTEXT, "hidden": 64, "initializer_range": 0.1, **FAMILIES[family]}
    checkpoint.save(make_model(family, **settings), tokenizer, directory)
    model = checkpoint.load_model(directory)
    same, exact = checkpoint.load_model(directory, dtype=dtype), checkpoint.load_model(directory)
    learner = Learner(model, GrpoConfig(lr=2e-4), dtype=str(dtype).removeprefix("torch."), seed=0)
    decoder, length = build_decoder(directory, device="cpu", dtype=dtype, slots=6, max_length=0)
    assert length == CONTEXT
    assert isinstance(decoder, TransformersDecoder if family == "gemma3_text" else LlamaDecoder)
    engine = Engine(decoder, eos=[], slots=6)
    rng = random.Random(family)
    for step in range(1, 4):
        requests = []
        for n in prompts:
            prompt = tuple(rng.randrange(5, 300) for _ in range(n))
            requests += [Request(prompt, answer, seed=i) for i, answer in enumerate(answers)]
        for request in requests:
            engine.submit(request)
        while engine.busy:
            engine.tick()
        assert [(r.finish, r.error, len(r.tokens)) for r in requests] == [
            ("length", "", answer) for _ in prompts for answer in answers
        ]
        assert {r.version for r in requests} == {step - 1}
        assert_sampled_as_by_transformers(requests, same, exact)

        samples = [
            TrainSample(
                prompt_ids=r.prompt,
                response_ids=r.tokens,
                logprobs=r.logprobs,
                advantage=1.0 if i % 2 else -1.0,
                rollout=i,
                group=str(i // len(answers)),
            )
            for i, r in enumerate(requests)
        ]
        metrics = learner.update(samples, step=step)
        close = 1e-3 if dtype == FP32 else 0.25
        assert metrics["ratio_max"] == pytest.approx(1.0, abs=close), "the server has the learner's weights"
        assert metrics["ratio_mean"] == pytest.approx(1.0, abs=close / 10)
        assert metrics["trained_tokens"] == sum(answers) * len(prompts)
        assert metrics["weight_change"] > 1e-3

        weights = {name: t.detach().to(dtype) for name, t in checkpoint.weights(model).items()}
        errors = []
        engine.swap(weights, step, errors.append)
        engine.tick()
        assert errors == [None]
        for reference in (same, exact):
            reference.load_state_dict(weights, strict=False)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_that_outgrow_the_first_cache(make_model, tokenizer, tmp_path, family, dtype):
    train(make_model, tokenizer, tmp_path, family, dtype, [50, 300], [1, 20])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_and_answers_of_all_lengths(make_model, tokenizer, tmp_path, family, dtype):
    train(make_model, tokenizer, tmp_path, family, dtype, [50, 300, 1500, 6000], [1, 7, 64, 512])
