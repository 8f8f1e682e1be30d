from __future__ import annotations

import statistics

import pytest
from agentrig_verl.credit import EPSILON, advantages
from hypothesis import given
from hypothesis import strategies as st

groups = st.lists(
    st.tuples(st.one_of(st.none(), st.sampled_from([0.0, 0.25, 1.0])), st.integers(1, 5)), min_size=1, max_size=8
)


def expected(samples, value):
    """Brute force over a written-out list of samples."""
    if len(samples) < 2 or len(set(samples)) == 1:
        return 0.0
    return (value - statistics.mean(samples)) / (statistics.stdev(samples) + EPSILON)


@given(groups)
def test_each_rollout_counts_once(group):
    values, calls = [v for v, _ in group], [c for _, c in group]
    samples = [v for v in values if v is not None]
    found = advantages(values, calls)
    assert found == pytest.approx([0.0 if v is None else expected(samples, v) for v in values], abs=1e-9)


@given(groups)
def test_each_call_counts_once(group):
    values, calls = [v for v, _ in group], [c for _, c in group]
    samples = [v for v, c in group if v is not None for _ in range(c)]
    rollouts = sum(v is not None for v in values)
    found = advantages(values, calls, weighting="call")
    want = [0.0 if v is None or rollouts < 2 else expected(samples, v) for v in values]
    assert found == pytest.approx(want, abs=1e-9)


def test_a_long_rollout_does_not_weigh_more():
    values = [1.0, 0.0, 0.0, 0.0]
    assert advantages(values, [1, 1, 1, 1]) == advantages(values, [9, 1, 1, 1])
    assert advantages(values, [1, 1, 1, 1], weighting="call") != advantages(values, [9, 1, 1, 1], weighting="call")


def test_failures_leave_the_baseline_alone():
    assert advantages([1.0, None, 0.0, None], [1, 3, 1, 2])[::2] == advantages([1.0, 0.0], [1, 1])


def test_a_rollout_that_is_alone_learns_nothing():
    assert advantages([1.0, None, None], [1, 1, 1]) == [0.0, 0.0, 0.0]


def test_the_mean_alone_is_taken_off_when_asked():
    assert advantages([1.0, 0.0], [1, 1], normalize=False) == [0.5, -0.5]


def test_negative_advantages_are_scaled_and_positive_ones_kept():
    plain = advantages([1.0, 0.0, 0.0], [1, 1, 1])
    assert advantages([1.0, 0.0, 0.0], [1, 1, 1], negative_scale=0.5) == [plain[0], plain[1] / 2, plain[2] / 2]


def test_one_call_each_agrees_with_verl(needs_verl):
    import numpy as np
    import torch
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    values = [1.0, 0.0, 0.25, 1.0]
    theirs, _ = compute_grpo_outcome_advantage(
        torch.tensor(values)[:, None], torch.ones(4, 1), np.array(["g"] * 4, dtype=object)
    )
    assert advantages(values, [1] * 4) == pytest.approx(theirs[:, 0].tolist(), abs=1e-6)


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="2 values, but 1"):
        advantages([1.0, 0.0], [1])
