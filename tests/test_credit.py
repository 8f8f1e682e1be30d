from __future__ import annotations

import re
import statistics
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrig.credit import EPSILON, advantages, group_advantages
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
    assert advantages([1.0, None, 0.0, None], [1, 3, 1, 2])[::2] == advantages([1.0, 0.0], [1, 1])


def test_a_single_rollout_has_no_advantage():
    assert advantages([1.0, None, None], [1, 1, 1]) == [0.0, 0.0, 0.0]


def test_only_the_mean_is_subtracted_if_requested():
    assert advantages([1.0, 0.0], [1, 1], normalize=False) == [0.5, -0.5]


def test_negative_advantages_are_scaled_and_positive_ones_kept():
    plain = advantages([1.0, 0.0, 0.0], [1, 1, 1])
    assert advantages([1.0, 0.0, 0.0], [1, 1, 1], negative_scale=0.5) == [plain[0], plain[1] / 2, plain[2] / 2]


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="2 values, but 1"):
        advantages([1.0, 0.0], [1])


def test_failures_stay_out_of_the_baseline():
    got = group_advantages(["a", "a", "a", "b", "b"], [1.0, None, 0.0, 1.0, 1.0])
    assert got == [0.5, None, -0.5, 0.0, 0.0]
    # If the failure counted as 0.0, the first rollout's advantage would be 2/3.
    assert group_advantages(["a"] * 3, [1.0, 0.0, 0.0])[0] == pytest.approx(2 / 3)


def test_the_only_valid_rollout_of_a_group_has_no_advantage():
    assert group_advantages(["a", "a"], [1.0, None], scale=True) == [0.0, None]


def test_only_negative_advantages_are_scaled():
    assert group_advantages(["a"] * 4, [1.0, 0.0, 0.0, 0.0], negative_scale=0.5) == [0.75, -0.125, -0.125, -0.125]


def test_equal_rewards_give_exactly_zero():
    assert group_advantages(["a"] * 3, [0.1] * 3, scale=True) == [0.0] * 3


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=9))
def test_scaled_advantages_follow_the_definition(values):
    got = group_advantages(["g"] * len(values), values, scale=True)
    if len(set(values)) == 1:
        assert got == [0.0] * len(values)
        return
    mean, std = statistics.fmean(values), statistics.stdev(values)
    for value, advantage in zip(values, got, strict=True):
        assert advantage == pytest.approx((value - mean) / (std + EPSILON), abs=1e-9)


@pytest.mark.parametrize("value", [1e308, -1e308, 1e13, float("inf"), float("nan")])
@pytest.mark.parametrize("scale", [False, True])
def test_a_reward_that_would_overflow_is_named(value, scale):
    with pytest.raises(
        AgentrigError, match=rf"rollout 3 .* group b, has the reward {re.escape(f'{value:g}')}.*Scale the reward"
    ):
        group_advantages(["a", "a", "b", "b"], [0.0, 1.0, 0.5, value], scale=scale)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.one_of(st.none(), st.floats(-5, 5))), max_size=12), st.booleans())
def test_each_group_has_its_own_baseline(rollouts, scale):
    names, values = [g for g, _ in rollouts], [v for _, v in rollouts]
    got = group_advantages(names, values, scale=scale, negative_scale=0.5)
    for name in set(names):
        own = [v for g, v in rollouts if g == name]
        credit = advantages(own, [1] * len(own), normalize=scale, negative_scale=0.5)
        want = [None if v is None else a for v, a in zip(own, credit, strict=True)]
        assert [a for g, a in zip(names, got, strict=True) if g == name] == want


def test_no_torch_is_imported():
    code = "import sys, agentrig.credit; print({'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
