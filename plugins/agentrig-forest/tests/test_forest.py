"""Forests: every shared token is computed once, and the results equal those of one sample at a time."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from agentrig_forest import attention, levels, lse, scoring, sequences
from agentrig_forest.segments import grow, packs
from fixtures import LLAMA_3
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrig import Triplet


@st.composite
def samples_of_a_step(draw, most=12):
    """Calls of groups, of conversations with several turns, and calls that are equal or share a prefix."""
    rng = random.Random(draw(st.integers(0, 1 << 30)))

    def tokens(low, high):
        return [rng.randrange(5, 12) for _ in range(rng.randint(low, high))]

    found = []
    for _ in range(rng.randint(1, 4)):
        history = tokens(1, 12)
        for _ in range(rng.randint(1, 3)):
            for _ in range(rng.randint(1, 3)):
                response = tokens(1, rng.choice([1, 3, 9]))
                found.append(Triplet(prompt_ids=history, response_ids=response))
            history = [*history, *response, *tokens(0, 4)]
    if rng.random() < 0.5:
        found.append(rng.choice(found))  # the same call twice
    if rng.random() < 0.5:
        other = rng.choice(found)
        found.append(Triplet(prompt_ids=[*other.prompt_ids, *other.response_ids], response_ids=tokens(1, 3)))
    rng.shuffle(found)
    return found[:most]


def inputs(sample):
    return [*sample.prompt_ids, *sample.response_ids[:-1]]


@settings(max_examples=200, deadline=None)
@given(samples_of_a_step(40), st.integers(1, 120))
def test_packs_have_each_sample_once_after_its_own_tokens(samples, budget):
    forest = grow(samples)
    prefixes = {tuple(inputs(s)[:n]) for s in samples for n in range(1, len(inputs(s)) + 1)}
    assert forest.tokens == len(prefixes), "every shared token is in the forest once"
    seen = []
    for pack in packs(forest, budget):
        assert pack.tokens <= budget or len(pack.scored) == 1
        held = set(pack.segments)
        for index in pack.scored:
            path = forest.path(index)
            assert held.issuperset(path)
            for i in forest.segments[index].ends:
                assert np.concatenate([forest.segments[p].tokens for p in path]).tolist() == inputs(samples[i])
                seen.append(i)
    assert sorted(seen) == list(range(len(samples)))


def apart(model, samples):
    found = []
    for s in samples:
        logits = model(torch.tensor([[*s.prompt_ids, *s.response_ids]])).logits[0, len(s.prompt_ids) - 1 : -1]
        found.append(torch.log_softmax(logits, -1).gather(1, torch.tensor(s.response_ids)[:, None])[:, 0])
    return found


def scored(model, samples, budget, varlen=False):
    found = [[None] * len(s.response_ids) for s in samples]
    for pack in sequences.packed(samples, budget, share=True):
        batch = sequences.collate(pack, share=True, varlen=varlen)
        logprobs, _ = scoring.score(model, batch)
        for sample, place, value in zip(batch.sample, batch.place, logprobs, strict=True):
            assert found[sample][place] is None, "each response token is scored once"
            found[sample][place] = value
    return [torch.stack(values) for values in found]


def check_equal(model, plain, samples, budget, *, varlen=False):
    ours, theirs = scored(model, samples, budget, varlen), apart(plain, samples)
    generator = torch.Generator().manual_seed(budget)
    # All positive: with both signs, equal calls would cancel, and only rounding errors would be compared.
    weights = [0.5 + torch.rand(len(t), generator=generator) for t in theirs]
    for logprobs, m in ((ours, model), (theirs, plain)):
        m.zero_grad()
        sum((w * t).sum() for w, t in zip(weights, logprobs, strict=True)).backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    whole = float(torch.stack([p.grad.norm() for p in plain.parameters()]).norm())
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        scale = max(float(b.grad.norm()), whole / 100)  # a gradient near 0 is only rounding error
        assert float((a.grad - b.grad).norm()) <= 1e-5 * scale, name


FAMILIES = {
    "Qwen2, Qwen2.5": ("qwen2", {}),
    "Qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": False}),
    "Llama 3": ("llama", {"rope_parameters": LLAMA_3, "tie_word_embeddings": False}),
    "Mistral, without a sliding window": ("mistral", {"sliding_window": None, "tie_word_embeddings": False}),
    "SmolLM": ("llama", {"hidden": 36, "num_attention_heads": 9, "num_key_value_heads": 3}),
}
"""The table of docs/learner.md."""


@pytest.mark.parametrize(
    ("family", "block"),
    [
        *(pytest.param("Qwen2, Qwen2.5", block, marks=pytest.mark.slow) for block in (2, 512)),
        *((f, 7) if f == "Qwen3" else pytest.param(f, 7, marks=pytest.mark.slow) for f in FAMILIES),
        *(("Qwen2, Qwen2.5", block) for block in ("levels", "long nodes")),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("Qwen3", "levels"), ("SmolLM", "long nodes"))),
    ],
)
def test_log_probs_and_gradients_equal_one_sample_at_a_time(make_model, monkeypatch, family, block):
    """In blocks of so many tokens, or in levels: the layout of a GPU, here by the CPU's kernel."""
    varlen = isinstance(block, str)
    if block == "long nodes":
        only_long_nodes(monkeypatch)
    elif not varlen:
        monkeypatch.setattr(attention, "BLOCK", block)  # long segments are split, and subtrees are joined
    kind, more = FAMILIES[family]
    model, plain = make_model(kind, **more), make_model(kind, **more)
    assert scoring.prepare(model)
    for before, after in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(before, after)

    @settings(max_examples=15, deadline=None, derandomize=True)
    @given(samples_of_a_step(), st.integers(1, 200))
    def equal(samples, budget):
        check_equal(model, plain, samples, budget, varlen=varlen)

    equal()


def only_long_nodes(patch):
    """Nodes of two tokens are computed together with others of their shape, in even lengths."""
    patch.setattr(levels, "LONG", 2)
    patch.setattr(lse, "STEPS", ((1 << 62, 2),))


def test_a_conversation_is_one_sequence_and_branches_are_levels():
    """Only where histories branch do tokens attend in a further call: not at each turn."""
    turns = [Triplet(prompt_ids=[5, *range(6, 6 + 3 * n)], response_ids=[60 + n, 7, 8]) for n in range(1, 4)]
    straight = [Triplet(prompt_ids=[*range(5, 20)][: 5 * n], response_ids=[5 + 5 * n]) for n in range(1, 4)]
    (pack,) = packs(grow(straight), 100)
    assert len(pack.segments) == 3
    layout = levels.Levels.of(pack)
    assert (layout.own[0].kernel.cu_q.tolist(), layout.above) == ([0, 15], [])
    (pack,) = packs(grow(turns), 100)
    layout = levels.Levels.of(pack)
    # 5..8; 9..11; 12..14 with the last answer; the second and the first answer
    assert layout.own[0].kernel.cu_q.tolist() == [0, 4, 7, 12, 14, 16]
    assert [call.k for call in layout.above] == [(0, 4), (4, 7)]
    assert [call.q for call in layout.above] == [(4, 16), (7, 14)]


def test_the_docs_name_the_models_that_are_tested():
    page = Path(__file__).resolve().parents[3] / "docs" / "learner.md"
    rows = re.findall(r"^\| (.+?) \| `(\w+)` \| yes \|$", page.read_text("utf-8"), re.M)
    assert rows == [(family, kind) for family, (kind, _) in FAMILIES.items()]
    assert {kind for kind, _ in FAMILIES.values()} == scoring.SHARING


def test_models_whose_calls_share_no_tokens_are_named_with_the_reason(make_model):
    for kind, more, reason in (
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4}, "models of type gpt2 are not among llama, mistral"),
        ("mistral", {"sliding_window": 16}, r"sees the last 16 tokens only \(sliding_window\)"),
        ("qwen2", {}, "the attention is eager"),
    ):
        model = make_model(kind, **more)
        if kind == "qwen2":
            model.set_attn_implementation("eager")
        assert re.search(reason, scoring.why_not_shared(model))
        assert not scoring.shares_tokens(model)
    assert scoring.why_not_shared(make_model()) == ""
