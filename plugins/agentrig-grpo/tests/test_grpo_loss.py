from __future__ import annotations

import random

import pytest
from agentrig_grpo.loss import sample_weights


def test_token_weights_are_equal_and_sum_to_one():
    assert sample_weights([3, 5, 2], [0, 0, 1], "token-mean") == [0.1] * 3


def test_a_rollout_with_many_calls_does_not_outweigh_the_others():
    rng = random.Random(0)
    lengths = [rng.randrange(1, 30) for _ in range(12)]
    rollouts = [0] * 10 + [1, 2]
    weights = sample_weights(lengths, rollouts, "seq-mean-token-mean")
    share = {r: sum(w * n for w, n, o in zip(weights, lengths, rollouts, strict=True) if o == r) for r in range(3)}
    assert share == pytest.approx({0: 1 / 3, 1: 1 / 3, 2: 1 / 3})
    assert len(set(weights[:10])) == 1, "within a rollout all tokens weigh the same"
