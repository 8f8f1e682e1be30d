from __future__ import annotations

from collections import Counter

import pytest
from agentrig_verl.merge import merge, segment_of
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrig import Triplet


def triplet(prompt, response, start=0.0):
    return Triplet(
        prompt_ids=tuple(prompt),
        response_ids=tuple(response),
        logprobs=tuple(-0.01 * (i + 1) - start for i in range(len(response))),
    )


def learned(segments):
    """Brute force: every trained token with all tokens before it, and its log-probability."""
    found = Counter()
    for s in segments:
        for i, (token, trained) in enumerate(zip(s.response_ids, s.mask, strict=True)):
            if trained:
                found[(s.prompt_ids + s.response_ids[:i], token, s.logprobs[i])] += 1
    return found


@st.composite
def conversations(draw):
    """Calls of an agent that continues one of its earlier calls or starts a new conversation, over few tokens."""
    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=4)
    calls = []
    for number in range(draw(st.integers(0, 8))):
        base = draw(st.sampled_from([None, *calls])) if calls else None
        prompt = (
            draw(tokens)
            if base is None
            else [*base.prompt_ids, *base.response_ids, *draw(st.lists(st.integers(0, 2), max_size=3))]
        )
        calls.append(triplet(prompt, draw(tokens), start=float(number)))
    return calls


@settings(max_examples=500, deadline=None)
@given(conversations())
def test_merged_calls_train_the_same_tokens_after_the_same_tokens(calls):
    merged = merge(calls)
    assert learned(merged) == learned([segment_of(c) for c in calls])
    assert sum(s.calls for s in merged) == len(calls)
    assert all(len(s.mask) == len(s.response_ids) == len(s.logprobs) for s in merged)


def test_a_conversation_becomes_one_sequence():
    one = triplet([1, 2], [3])
    two = triplet([1, 2, 3, 4], [5, 6])
    three = triplet([1, 2, 3, 4, 5, 6, 7], [8])
    (merged,) = merge([one, two, three])
    assert merged.prompt_ids == (1, 2)
    assert merged.response_ids == (3, 4, 5, 6, 7, 8)
    assert merged.mask == (1, 0, 1, 1, 0, 1)
    assert merged.calls == 3


def test_parallel_conversations_stay_separate():
    a1, b1 = triplet([1], [2]), triplet([9], [8])
    a2, b2 = triplet([1, 2, 5], [6]), triplet([9, 8, 5], [7])
    merged = merge([a1, b1, a2, b2])
    assert [s.ids for s in merged] == [(1, 2, 5, 6), (9, 8, 5, 7)]


def test_a_branch_starts_a_new_sequence():
    base, left, right = triplet([1], [2]), triplet([1, 2, 3], [4]), triplet([1, 2, 5], [6])
    merged = merge([base, left, right])
    assert [(s.ids, s.mask) for s in merged] == [((1, 2, 3, 4), (1, 0, 1)), ((1, 2, 5, 6), (1,))]


def test_prompts_that_rarely_extend_one_another_are_not_merged():
    calls = [triplet([1, 2, 3], [4]), triplet([1, 2, 9], [4])]
    assert [s.calls for s in merge(calls)] == [1, 1]


def test_log_probabilities_are_all_there_or_none():
    known, unknown = triplet([1], [2]), Triplet(prompt_ids=(1, 2, 3), response_ids=(4,))
    (merged,) = merge([known, unknown])
    assert merged.logprobs is None


def test_the_gradient_is_that_of_the_unmerged_calls():
    torch = pytest.importorskip("torch")
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).double()
    calls = [triplet([1, 2, 3], [4, 5]), triplet([9, 8], [7]), triplet([1, 2, 3, 4, 5, 6, 7], [8, 9, 10]),
             triplet([9, 8, 7, 6], [5]), triplet([1, 2, 3, 4, 5, 11], [12])]  # fmt: skip

    def gradient(segments):
        model.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for s in segments:
            ids = torch.tensor([s.ids])
            logits = model(ids).logits[0, len(s.prompt_ids) - 1 : -1].log_softmax(-1)
            picked = logits.gather(1, torch.tensor(s.response_ids)[:, None])[:, 0]
            loss = loss - (picked * torch.tensor(s.mask)).sum()
        loss.backward()
        return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])

    merged = merge(calls)
    assert len(merged) == 3
    loss, grad = gradient(merged)
    expected_loss, expected = gradient([segment_of(c) for c in calls])
    # transformers computes norms and rotary angles in fp32 whatever the weights are, so this is fp32's rounding
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert torch.allclose(grad, expected, atol=1e-5)
    for s in merged:
        s.mask = (1,) * len(s.mask)
    assert not torch.allclose(gradient(merged)[1], expected, atol=1e-2)
