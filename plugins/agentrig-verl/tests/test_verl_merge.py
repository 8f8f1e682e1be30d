from __future__ import annotations

from collections import Counter

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
    assert sum(len(s.pieces) for s in merged) == len(calls)
    assert all(len(s.mask) == len(s.response_ids) == len(s.logprobs) for s in merged)


def test_prompts_that_rarely_extend_one_another_are_not_merged():
    calls = [triplet([1, 2, 3], [4]), triplet([1, 2, 9], [4])]
    assert [len(s.pieces) for s in merge(calls)] == [1, 1]


def test_log_probabilities_are_all_there_or_none():
    known, unknown = triplet([1], [2]), Triplet(prompt_ids=(1, 2, 3), response_ids=(4,))
    (merged,) = merge([known, unknown])
    assert merged.logprobs is None
