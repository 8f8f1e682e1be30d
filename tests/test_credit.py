from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrig.credit import EPSILON, advantages

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


def test_values_that_differ_by_rounding_are_equal():
    assert advantages([0.3, 0.1 + 0.2, None]) == [0.0] * 3
    assert all(advantages([0.3, 0.3 + 1e-11]))


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="2 values, but 1"):
        advantages([1.0, 0.0], [1])
