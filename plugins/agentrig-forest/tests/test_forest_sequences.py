"""Rows with padding, for models whose tokens cannot be shared, and log-probabilities."""

from __future__ import annotations

import random

import pytest
import torch
from agentrig_forest import head
from agentrig_forest.kernels import fuse_norms
from agentrig_forest.scoring import prepare, score, token_entropy, token_logprobs
from agentrig_forest.sequences import collate, packed
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from agentrig import Triplet


def triplets(n=9, seed=0):
    rng = random.Random(seed)
    prompts = [[rng.randrange(5, 300) for _ in range(rng.randrange(3, 20))] for _ in range(3)]
    return [
        Triplet(
            prompt_ids=prompts[rng.randrange(3)],
            response_ids=[rng.randrange(5, 300) for _ in range(rng.randrange(1, 9))],
        )
        for _ in range(n)
    ]


def scored(model, samples, *, budget):
    share = prepare(model)
    out = [[None] * len(s.response_ids) for s in samples]
    for pack in packed(samples, budget, share=share):
        batch = collate(pack, share=share)
        logprobs, _ = score(model, batch)
        for sample, place, value in zip(batch.sample, batch.place, logprobs, strict=True):
            assert out[sample][place] is None
            out[sample][place] = value
    return [torch.stack(values) for values in out]


FALLBACKS = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "final_logit_softcapping": 5.0},
}


@pytest.mark.parametrize("kind", FALLBACKS)
def test_the_fallback_gives_the_numbers_of_the_models_own_forward(make_model, kind):
    model, samples = make_model(kind, **FALLBACKS[kind]), triplets()
    shapes = []
    model.lm_head.register_forward_hook(lambda _module, _input, output: shapes.append(output.shape))
    with torch.no_grad():
        found = scored(model, samples, budget=10_000)
        (shape,) = shapes
        longest = max(len(s.prompt_ids) + len(s.response_ids) for s in samples)
        assert shape[1] < longest, "prompts' logits are left out"
        for s, logprobs in zip(samples, found, strict=True):
            logits = model(torch.tensor([[*s.prompt_ids, *s.response_ids]])).logits[0, len(s.prompt_ids) - 1 : -1]
            expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(s.response_ids)[:, None])[:, 0]
            torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logits_in_chunks_give_the_same_numbers_and_gradients(make_model, monkeypatch, kind, temperature):
    found = []
    for chunk in (1 << 26, 300 * 4):  # all at once, and four tokens at a time
        monkeypatch.setattr("agentrig_forest.scoring.CHUNK", chunk)
        model = make_model(kind)
        prepare(model)
        (pack,) = packed(triplets(20), 10_000, share=True)
        logprobs, entropy = score(model, collate(pack, share=True), temperature)
        assert not entropy.requires_grad
        logprobs.sum().backward()
        found.append((logprobs.detach(), entropy, {n: p.grad for n, p in model.named_parameters()}))
    (a, b), (c, d) = found[0][:2], found[1][:2]
    torch.testing.assert_close(a, c, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(b, d, atol=1e-5, rtol=1e-5)
    for name, gradient in found[0][2].items():
        torch.testing.assert_close(gradient, found[1][2][name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "mistral"])
def test_fused_norms_give_the_same_numbers_and_gradients(make_model, kind):
    found, more = [], {"sliding_window": None} if kind == "mistral" else {}
    for fused in (False, True):
        model = make_model(kind, **more)
        prepare(model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:  # ones would hide that a weight is left out
                    parameter.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(len(name)))
        if fused:
            assert fuse_norms(model) == {"qwen3": 9}.get(kind, 5)
        (pack,) = packed(triplets(20), 10_000, share=True)
        logprobs, _ = score(model, collate(pack, share=True))
        logprobs.sum().backward()
        found.append((logprobs.detach(), {n: p.grad for n, p in model.named_parameters()}))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-5, rtol=1e-5)
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(gradient, found[1][1][name], atol=1e-4, rtol=1e-4, msg=name)


def test_an_empty_response_is_refused():
    samples = [Triplet(prompt_ids=[1], response_ids=[2]), Triplet(prompt_ids=[1, 2], response_ids=[])]
    with pytest.raises(ValueError, match="sample 1 has 2 prompt and 0 response"):
        list(packed(samples, 100, share=True))


def test_a_checkpoint_does_not_name_the_learners_attention(make_model, tmp_path):
    model = make_model()
    prepare(model)
    model.save_pretrained(tmp_path)
    assert "agentrig" not in (tmp_path / "config.json").read_text()


def test_temperature_and_entropy_follow_the_definition(monkeypatch):
    monkeypatch.setattr("agentrig_forest.scoring.ENTROPY_ROWS", 3)
    logits = torch.randn(7, 11, generator=torch.Generator().manual_seed(1))
    targets = torch.arange(7)
    for temperature in (0.5, 1.0, 2.0):
        p = torch.softmax(logits.double() / temperature, -1)
        expected = p[torch.arange(7), targets].log().float()
        torch.testing.assert_close(token_logprobs(logits, targets, temperature), expected)
        torch.testing.assert_close(token_entropy(logits, temperature), -(p * p.log()).sum(-1).float())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("rows", [3, 100])
def test_a_gpus_log_probs_and_their_gradients_are_those_of_log_softmax(temperature, rows):
    """In chunks of logits or at once, here with torch's operations instead of the GPU's kernels."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator, requires_grad=True) for n in (10, 50))
    targets = torch.randint(50, (10,), generator=generator)
    gradient = torch.randn(10, generator=generator)
    found, entropy = head.logprobs(hidden, weight, targets, temperature, rows)
    logp = torch.log_softmax(hidden @ weight.t() / temperature, -1)
    expected = logp.gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(entropy, -(logp.exp() * logp).sum(-1))
    assert not entropy.requires_grad
    ours, theirs = (torch.autograd.grad(out, (hidden, weight), gradient) for out in (found, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_kernels_of_the_head_give_what_torchs_operations_give(temperature):
    pytest.importorskip("triton")
    generator = torch.Generator("cuda").manual_seed(0)
    more = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    hidden, weight = (torch.randn(n, 256, **more).requires_grad_() for n in (700, 9001))
    targets = torch.randint(9001, (700,), generator=generator, device="cuda")
    gradient = torch.randn(700, generator=generator, device="cuda")
    logp = torch.log_softmax((hidden @ weight.t()).float() / temperature, -1)
    expected = logp.gather(1, targets[:, None])[:, 0]
    theirs = torch.autograd.grad(expected, (hidden, weight), gradient)
    for rows in (100, 1000):
        found, entropy = head.logprobs(hidden, weight, targets, temperature, rows)
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(entropy, -(logp.exp() * logp).sum(-1), atol=1e-3, rtol=1e-3)
        for a, b in zip(torch.autograd.grad(found, (hidden, weight), gradient), theirs, strict=True):
            assert float((a - b).norm() / b.norm()) < 1e-2


@pytest.mark.parametrize(("rows", "products"), [(3, 2), (100, 1)])
def test_the_gradient_of_a_frozen_head_is_not_computed(rows, products):
    """It would be as large as the head: 1 GiB of 7B, in each pass with adapters."""
    hidden, weight = torch.randn(10, 8, requires_grad=True), torch.randn(50, 8)
    found, _ = head.logprobs(hidden, weight, torch.arange(10), 1.0, rows)
    with FlopCounterMode(display=False) as counter:
        found.sum().backward()
    assert counter.get_total_flops() == products * 2 * 10 * 8 * 50  # that of the states, and chunks of logits again


def test_only_a_plain_linear_head_in_bf16_on_a_gpu_is_computed_by_its_kernels(make_model):
    model = make_model()
    hidden = torch.zeros(1, model.config.hidden_size)
    assert not head.fits(model.get_output_embeddings(), hidden)
    assert not head.fits(model.to(torch.bfloat16).get_output_embeddings(), hidden.bfloat16())


def test_an_estimate_of_memory_computes_the_head_by_torchs_operations(monkeypatch):
    """In fp32, as `agentrig_grpo.memory` says: by the kernels the estimate of some updates was less than they took."""
    monkeypatch.setattr(head, "has_triton", lambda: True)
    mode = FakeTensorMode()
    linear = torch.nn.Linear(8, 16, bias=False, device="meta")
    weight, hidden = (
        FakeTensor(mode, torch.empty(rows, 8, device="meta", dtype=torch.bfloat16), torch.device("cuda:0"))
        for rows in (16, 3)
    )
    linear.weight = torch.nn.Parameter(weight)
    assert not head.fits(linear, hidden)
