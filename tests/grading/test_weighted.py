"""The reward `weighted`: parts with settings of their own, one that decides accuracy, and messages."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import attrs
import pytest

from agentrig import Outcome, Task, Trace
from agentrig.errors import ConfigError, LookupFailed
from agentrig.plan import resolve, to_toml

PLUGIN = """
import time
import attrs
from agentrig import RewardSpec, Score, Span, hookimpl
from agentrig.settings import setting

@attrs.frozen(kw_only=True)
class Config:
    right: float = setting(1.0, help="reward of a right answer", gt=0)

def exact(config):
    def reward(task, outcome, budget_s):
        if outcome.answer == "late":
            return Score.timeout("slow query")
        if outcome.answer == "broken":
            return Score.invalid("no database")
        return Score.ok(config.right * (outcome.answer == task.private["gold"]), rows=3.0)
    return reward

def calls(task, outcome, budget_s, trace):
    time.sleep(0.05)
    return Score.ok(float(len(trace.spans)))

@hookimpl
def register_rewards():
    yield RewardSpec(name="exact", summary="1 if equal.", config=Config, build=exact, correct_at=0.5)
    yield RewardSpec(name="calls", summary="Counts spans.", sees_trace=True, build=lambda config: calls)
"""

TASK = Task(id="t", input={"question": "q"}, private={"gold": "yes"})


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("plugin") / "two_rewards.py"
    file.write_text(PLUGIN)
    return str(file)


def plan_of(plugin, *overrides, **run):
    return resolve("mini", uses={"reward": "weighted"}, files=[plugin], overrides=overrides)


def rollouts(*answers, spans=()):
    return [(TASK, Outcome(answer=answer), Trace(rollout_id="r", spans=spans)) for answer in answers]


def scored(plan, *answers, spans=()):
    with closing(plan.scorer()) as scorer:
        return scorer(rollouts(*answers, spans=spans))


def test_values_are_added_by_weight_and_the_primary_part_decides_what_is_correct(plugin):
    plan = plan_of(plugin, "reward.parts.calls=-0.5", "reward.parts.exact.weight=2", "reward.parts.exact.right=0.6",
                   "reward.primary=exact")  # fmt: skip
    right, wrong = scored(plan, "yes", "no")
    assert (right.value, right.correct, wrong.value, wrong.correct) == (1.2, True, 0.0, False)
    assert right.components == {"calls": 0.0, "exact": 0.6, "exact.rows": 3.0}
    from agentrig import Span

    spans = tuple(Span(id=str(i), parent=None, name="s", start=0, end=1) for i in range(2))
    assert scored(plan, "yes", spans=spans)[0].value == pytest.approx(0.2), "a part may see the trace"


def test_the_first_part_decides_by_default_and_parts_of_a_part_are_allowed(plugin):
    inner = '{use = "weighted", weight = 0.5, primary = "exact", parts = {exact = 1, calls = 1}}'
    plan = plan_of(plugin, f"reward.parts={{both = {inner}, calls = 0}}")
    (score,) = scored(plan, "yes")
    assert (score.value, score.correct) == (0.5, True)
    assert score.components["both.exact"] == 1.0


def test_a_part_that_fails_makes_the_whole_invalid_and_a_late_one_a_timeout(plugin):
    plan = plan_of(plugin, "reward.parts.exact=1", "reward.parts.calls=1")
    broken, late = scored(plan, "broken", "late")
    assert (broken.status, broken.details["reason"]) == ("invalid", "the part exact: no database")
    assert (late.status, late.value, late.correct) == ("timeout", 0.0, False)
    assert late.details["reason"] == "the part exact: slow query"


def test_parts_are_scored_at_the_same_time(plugin):
    plan = plan_of(plugin, 'reward.parts={a = {use = "calls"}, b = {use = "calls"}, c = {use = "calls"}}')
    with closing(plan.scorer()) as scorer:
        scorer(rollouts("warm"))
        start = time.perf_counter()
        scorer(rollouts(*["yes"] * 8))  # 8 x 0.05 s in four threads a part
    assert time.perf_counter() - start < 3 * 2 * 0.05 + 0.1


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("reward.parts.exakt=1", 'there is no reward called "exakt"'),
        ("reward.parts.exact.righ=1", '[reward.parts.exact] exact'),
        ("reward.parts.exact.right=-1", "right"),
        ("reward.parts.exact=true", "must be a finite number"),
        ("reward.primary=calls", 'primary = "calls" is no part'),
        ("reward.parts={}", "there are no parts"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_the_parts_is_said_before_the_run(plugin, override, words):
    base = [] if "parts={}" in override else ["reward.parts.exact=1"]
    with pytest.raises((ConfigError, LookupFailed)) as caught:
        plan_of(plugin, *base, override)
    assert words in str(caught.value)


def test_the_resolved_configuration_is_a_run_file_of_the_same_reward(plugin, tmp_path: Path):
    plan = plan_of(plugin, "reward.parts.exact.right=0.5", "reward.parts.calls=0.1",
                   'run.second_reward=["exact", "calls"]', "second_reward.exact.right=3.0")  # fmt: skip
    file = tmp_path / "same.toml"
    file.write_text(to_toml(plan.as_dict()))
    again = resolve(str(file))
    assert again.as_dict() == plan.as_dict()
    assert [(c.spec.name, attrs.asdict(config)) for c, config in again.second_rewards] == [
        ("exact", {"right": 3.0}),
        ("calls", {}),
    ]
