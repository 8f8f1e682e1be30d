from __future__ import annotations

import random

import pytest
import torch
from agentrig_grpo.scoring import response_logits, token_entropy, token_logprobs
from agentrig_grpo.sequences import batches_of, collate, rows_of

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


def scattered(model, samples, *, share, budget):
    out = [[None] * len(s.response_ids) for s in samples]
    for rows in batches_of(rows_of(samples, share=share), budget):
        batch = collate(rows)
        logprobs = token_logprobs(response_logits(model, batch), batch.targets)
        for sample, place, value in zip(batch.sample, batch.place, logprobs, strict=True):
            assert out[sample][place] is None
            out[sample][place] = value
    return [torch.stack(values) for values in out]


@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3"])
def test_a_shared_prompt_gives_the_numbers_of_separate_sequences(make_model, kind):
    model, samples = make_model(kind), triplets()
    with torch.no_grad():
        shared = scattered(model, samples, share=True, budget=200)
        apart = []
        for s in samples:
            ids = torch.tensor([[*s.prompt_ids, *s.response_ids]])
            logits = model(ids).logits[0, len(s.prompt_ids) - 1 : -1]
            apart.append(torch.log_softmax(logits, -1).gather(1, torch.tensor(s.response_ids)[:, None])[:, 0])
    for a, b in zip(shared, apart, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_a_shared_prompt_gives_the_same_gradient(make_model):
    gradients = []
    for share in (True, False):
        model = make_model()
        torch.cat(scattered(model, triplets(), share=share, budget=150)).sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-4, rtol=1e-4)


def test_an_architecture_without_shared_prompts_still_gets_its_numbers(make_model):
    model = make_model("gpt2", n_embd=32, n_layer=2, n_head=4, n_positions=64)
    with torch.no_grad():
        rows = scattered(model, triplets(), share=False, budget=200)
        single = scattered(model, triplets(), share=False, budget=1)
    for a, b in zip(rows, single, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_a_family_of_the_fallback_gets_the_numbers_of_its_own_forward(make_model):
    settings = {"head_dim": 16, "query_pre_attn_scalar": 16, "final_logit_softcapping": 5.0}
    model, samples = make_model("gemma2", **settings), triplets()
    shapes = []
    model.lm_head.register_forward_hook(lambda _module, _input, output: shapes.append(output.shape))
    with torch.no_grad():
        found = scattered(model, samples, share=False, budget=10_000)
        (shape,) = shapes
        longest = max(len(s.prompt_ids) + len(s.response_ids) for s in samples)
        assert shape[1] < longest, "prompts' logits are left out"
        for s, logprobs in zip(samples, found, strict=True):
            logits = model(torch.tensor([[*s.prompt_ids, *s.response_ids]])).logits[0, len(s.prompt_ids) - 1 : -1]
            expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(s.response_ids)[:, None])[:, 0]
            torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)


def test_batches_keep_the_budget_and_lose_nothing():
    samples = triplets(60)
    rows = rows_of(samples, limit=40)
    assert max(len(r.responses) for r in rows) > 1
    seen = []
    for batch in batches_of(rows, 100):
        assert len(batch) == 1 or len(batch) * max(r.length for r in batch) <= 100
        seen += [i for row in batch for i in row.samples]
    assert sorted(seen) == list(range(60))
    assert all(r.length <= 40 or len(r.responses) == 1 for r in rows)


def test_an_empty_response_is_refused():
    with pytest.raises(ValueError, match="sample 1 has 2 prompt and 0 response"):
        rows_of([Triplet(prompt_ids=[1], response_ids=[2]), Triplet(prompt_ids=[1, 2], response_ids=[])])


def test_temperature_and_entropy_follow_the_definition(monkeypatch):
    monkeypatch.setattr("agentrig_grpo.scoring.ENTROPY_ROWS", 3)
    logits = torch.randn(7, 11, generator=torch.Generator().manual_seed(1))
    targets = torch.arange(7)
    for temperature in (0.5, 1.0, 2.0):
        p = torch.softmax(logits.double() / temperature, -1)
        expected = p[torch.arange(7), targets].log().float()
        torch.testing.assert_close(token_logprobs(logits, targets, temperature), expected)
        torch.testing.assert_close(token_entropy(logits, temperature), -(p * p.log()).sum(-1).float())
