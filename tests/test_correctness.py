"""What counts as correct: one rule, for every figure called accuracy."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pyarrow.parquet as pq
import pytest
from model_server import ModelServer
from rollouts import rollout

from agentrig import Outcome, Score, Task
from agentrig.algorithms import Measurement
from agentrig.correctness import Correctness, by_turn, turn_of
from agentrig.plan import Plan
from agentrig.rollouts import Rollout
from agentrig.run.evaluate import evaluate
from agentrig.run.training import train
from agentrig.runners.engine import RolloutEngine
from agentrig.runners.scorer import Scorer

MakePlan = Callable[..., Plan]

ITEM = (Task(id="t", input={}), Outcome(answer="x"))


@pytest.mark.parametrize(
    ("run_at", "said", "reward_at", "value", "correct"),
    [
        (None, None, None, 1.0, True),
        (None, None, None, 0.99, False),
        (None, None, 0.5, 0.5, True),
        (None, None, 5.0, 4.0, False),
        (None, True, 5.0, 0.0, True),
        (None, False, None, 1.0, False),
        (0.5, False, 0.9, 0.6, True),
        (7.0, True, None, 6.0, False),
        (-0.5, None, None, -0.2, True),
    ],
)
def test_the_first_component_that_reports_it_decides(
    run_at: float | None, said: bool | None, reward_at: float | None, value: float, correct: bool
) -> None:
    rule = Correctness(run_at=run_at, reward_at=reward_at)
    (score,) = Scorer(lambda t, o, b: Score.ok(value, correct=said), budget_s=5, correctness=rule)([ITEM])
    assert score.correct is correct
    assert rule.warning == ""


def test_what_is_not_ok_is_not_correct() -> None:
    rule = Correctness(run_at=-1.0)
    scores = iter([Score.timeout("too slow"), Score.invalid("no database")])
    found = Scorer(lambda t, o, b: next(scores), budget_s=5, threads=1, correctness=rule)([ITEM, ITEM])
    assert [s.correct for s in found] == [False, None]
    for status, value in (("timeout", 1.0), ("invalid", None)):
        with pytest.raises(ValueError, match=f"status '{status}' cannot be correct"):
            Score(status=status, value=value, correct=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="use True, False or None"):
        Score(status="ok", value=1.0, correct="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("verdict", [True, np.True_, 1, 1.0, np.int64(1), False, np.False_, 0, 0.0, np.float64(0)])
def test_a_reward_reports_it_as_a_bool(verdict: Any) -> None:
    score = Score.ok(0.3, correct=verdict, style=0.5)
    assert (score.correct is bool(verdict), score.components) == (True, {"style": 0.5})


@pytest.mark.parametrize("number", [0.5, 2, np.float64(0.5), math.nan])
def test_another_number_is_no_verdict_and_no_component(number: Any) -> None:
    with pytest.raises(ValueError, match="use True, False or None \\(a component needs another name\\)"):
        Score.ok(0.3, correct=number, style=0.5)


@pytest.mark.parametrize("value", [-0.1, 1.5, 10])
def test_rewards_outside_0_to_1_without_a_rule_for_correct_are_warned_of_once(
    value: float, caplog: pytest.LogCaptureFixture
) -> None:
    rule = Correctness()
    Scorer(lambda t, o, b: Score.ok(value), budget_s=5, correctness=rule)([ITEM, ITEM])
    assert caplog.messages == [rule.warning]
    assert f"a reward of {value:g} is outside 0 to 1" in rule.warning
    for cure in ("run.correct_at=VALUE", "RewardSpec(correct_at=VALUE)", "Score.ok(value, correct=True or False)"):
        assert cure in rule.warning
    for said in (Correctness(reward_at=5), Correctness(run_at=5)):
        Scorer(lambda t, o, b: Score.ok(value), budget_s=5, correctness=said)([ITEM])
    Scorer(lambda t, o, b: Score.ok(value, correct=False), budget_s=5)([ITEM])
    assert len(caplog.messages) == 1


def test_a_measurement_leaves_failures_out() -> None:
    said = attrs.evolve(Score.ok(0.2), correct=True)
    rollouts = [rollout(1.0), rollout(0.5), rollout(None), rollout(failure="deadline"), rollout(score=said)]
    assert Measurement.of(rollouts) == Measurement(accuracy=2 / 3, reward=pytest.approx(1.7 / 3), n=3)
    assert Measurement.of([rollout(None)]) == Measurement(accuracy=None, reward=None, n=0)


BOUNDS = ["reward.right=0.9", "reward.wrong=-1.0"]
SMALL = ["algorithm.steps=1", "run.validation_tasks=4", "run.report_tasks=4", "algorithm.validate_first=true"]


@pytest.mark.parametrize(
    ("more", "accuracy"),
    [
        pytest.param([], 0.0, marks=pytest.mark.slow),
        (["spec"], 0.5),
        pytest.param(["run.correct_at=0.5"], 0.5, marks=pytest.mark.slow),
        pytest.param(["reward.says=true"], 0.5, marks=pytest.mark.slow),
    ],
)
def test_a_run_states_accuracy_and_mean_reward_side_by_side(
    model: ModelServer,
    toy_plan: MakePlan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    more: list[str],
    accuracy: float,
) -> None:
    plan = toy_plan(*SMALL, *BOUNDS, *(m for m in more if m != "spec"), *([] if more else ["run.block=[]"]))
    if "spec" in more:
        component = plan.components["reward"]
        declared = attrs.evolve(component, spec=attrs.evolve(component.spec, correct_at=0.5))
        plan = attrs.evolve(plan, components={**plan.components, "reward": declared})
    summary = train(plan)
    reward = pytest.approx(-0.05)
    assert (summary["accuracy"]["after"], summary["reward"]["after"]) == (accuracy, reward)
    assert (summary["validation_before"], summary["validation_reward_before"]) == (accuracy, reward)
    run = tmp_path / "runs" / "toy"
    line = json.loads((run / "metrics.jsonl").read_text())
    assert (line["accuracy"], line["reward"]) == (accuracy, reward)
    assert (line["validation_accuracy"], line["validation_reward"]) == (accuracy, reward)
    rows = pq.read_table(run / "rollouts" / "train-00001.parquet").to_pylist()
    assert {(r["value"], r["correct"]) for r in rows} == {(-1.0, False), (0.9, bool(accuracy))}
    assert [("run.correct_at" in w) for w in summary["warnings"]] == ([] if more else [True])
    if not more:
        assert "run.correct_at" in (run / "report.html").read_text()

    run_them, counted, then = RolloutEngine.run, list[Rollout](), list[int]()

    def run_all(*given: Any, **more: Any) -> list[Rollout]:
        ended = run_them(*given, **more)
        then.append(len(counted))
        return ended

    monkeypatch.setattr(RolloutEngine, "run", run_all)
    tasks = plan.build("tasks").load("test")[:4]
    found = evaluate(plan, tasks=tasks, endpoint=plan.build("algorithm").endpoint(), ended=counted.append)
    assert then == [4], "each is counted when it ends, not after the last one"
    assert (found.accuracy, found.reward) == (accuracy, reward)
    assert (found.as_dict()["accuracy"], found.as_dict()["reward"]) == (accuracy, reward)


@pytest.mark.parametrize(
    ("calls", "turn"),
    [
        ([], None),
        ([None, None], None),
        ([0.0, 0.99], "wrong at every turn"),
        ([1.0, 1.0], "right at turn 1"),
        ([None, 0.0, None, 1.0, 1.0], "repaired at turn 2"),
        ([1.0, 0.0, 0.0], "broken at turn 2"),
        ([0.0, 1.0, 0.0], "broken at turn 3"),
        ([1.0, 0.0, 1.0], "repaired at turn 3"),
    ],
)
def test_a_rollout_became_right_or_wrong_at_its_last_change(calls: list[float | None], turn: str | None) -> None:
    assert turn_of(calls) == turn


def test_rollouts_are_counted_by_turn_in_the_order_of_turns() -> None:
    wrong, broken, late, early = [0.0], [1.0, 0.0], [0.0] * 10 + [1.0], [0.0, 1.0]
    said = [{"turn": turn_of(calls)} for calls in (wrong, broken, late, [], early, [1.0], early)]
    counted = by_turn(
        [*said, {}, {"turn": 3}]
    )  # of a reward that scores calls without an answer, or says another thing
    assert list(counted.items()) == [
        ("right at turn 1", 1),
        ("repaired at turn 2", 2),
        ("repaired at turn 11", 1),
        ("broken at turn 2", 1),
        ("wrong at every turn", 1),
    ]
