from __future__ import annotations

import re
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrig.credit import EPSILON, advantages
from agentrig.errors import AgentrigError

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


def test_failures_do_not_change_the_baseline():
    assert advantages([1.0, None, 0.0, None], [1, 3, 1, 2])[::2] == advantages([1.0, 0.0])
    assert advantages([1.0, None, 0.0], normalize=False)[0] == 0.5, "not 2/3, as if the failure counted as 0.0"


def test_a_single_rollout_has_no_advantage():
    assert advantages([1.0, None, None], [1, 1, 1]) == [0.0, 0.0, 0.0]


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="2 values, but 1"):
        advantages([1.0, 0.0], [1])


def test_equal_rewards_give_exactly_zero():
    assert advantages([0.1] * 3) == [0.0] * 3


@pytest.mark.parametrize("value", [1e308, -1e308, 1e13, float("inf"), float("nan")])
@pytest.mark.parametrize("normalize", [False, True])
def test_a_reward_that_would_overflow_is_named(value, normalize):
    with pytest.raises(AgentrigError, match=rf"has the reward {re.escape(f'{value:g}')}.*Scale the reward"):
        advantages([0.0, 1.0, None, value], normalize=normalize)
