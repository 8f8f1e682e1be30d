from __future__ import annotations

import re
import statistics

import pytest
from agentrig_grpo.advantages import group_advantages
from hypothesis import given
from hypothesis import strategies as st

from agentrig.errors import AgentrigError


def test_failures_stay_out_of_the_baseline():
    got = group_advantages(["a", "a", "a", "b", "b"], [1.0, None, 0.0, 1.0, 1.0])
    assert got == [0.5, None, -0.5, 0.0, 0.0]
    # Counted as 0.0, the failure would have raised the first rollout's advantage to 2/3.
    assert group_advantages(["a"] * 3, [1.0, 0.0, 0.0])[0] == pytest.approx(2 / 3)


def test_a_rollout_without_company_has_no_advantage():
    assert group_advantages(["a", "a"], [1.0, None], scale=True) == [0.0, None]


def test_negative_advantages_are_scaled_alone():
    assert group_advantages(["a"] * 4, [1.0, 0.0, 0.0, 0.0], negative_scale=0.5) == [0.75, -0.125, -0.125, -0.125]


def test_equal_rewards_give_exactly_nothing():
    assert group_advantages(["a"] * 3, [0.1] * 3, scale=True) == [0.0] * 3


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=9))
def test_scaled_advantages_are_the_definition(values):
    got = group_advantages(["g"] * len(values), values, scale=True)
    if len(set(values)) == 1:
        assert got == [0.0] * len(values)
        return
    mean, std = statistics.fmean(values), statistics.stdev(values)
    for value, advantage in zip(values, got, strict=True):
        assert advantage == pytest.approx((value - mean) / (std + 1e-6), abs=1e-9)


@pytest.mark.parametrize("value", [1e308, -1e308, 1e13, float("inf"), float("nan")])
@pytest.mark.parametrize("scale", [False, True])
def test_a_reward_that_would_overflow_is_named(value, scale):
    with pytest.raises(
        AgentrigError, match=rf"rollout 3 .* group b, has the reward {re.escape(f'{value:g}')}.*Scale the reward"
    ):
        group_advantages(["a", "a", "b", "b"], [0.0, 1.0, 0.5, value], scale=scale)
