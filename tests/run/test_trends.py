"""Guards over several steps; a resumed run counts like an uninterrupted one."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from model_server import ModelServer
from rollouts import rollout

from agentrig.errors import RunStopped
from agentrig.plan import Plan
from agentrig.rewards import Score
from agentrig.rollouts import Rollout
from agentrig.run.metrics import reward_figures
from agentrig.run.resume import resume_plan
from agentrig.run.training import train
from agentrig.run.trends import Guards, Signal
from agentrig.text import without_nan

MakePlan = Callable[..., Plan]


def line(step: int, reward: float = 0.5, std: float = 0.5, **figures: float) -> dict[str, Any]:
    """A line of metrics: all rewards are equal if `std` is 0, and correct if the reward is 1."""
    return {
        "step": step,
        "reward": reward,
        "reward_std": std,
        "accuracy": float(reward >= 1),
        "rollouts": 8,
        "failures": {},
        "groups": 4,
        "zero_variance_groups": 1.0 if std == 0 else 0.5,
        "algorithm": {"weight_change": 0.1, **figures},
    }


def followed(lines: Sequence[dict[str, Any]]) -> Guards:
    """Return the guards of a run after these steps, each of which was checked at its end."""
    guards = Guards()
    for each in lines:
        guards.add(each)
        guards.check(each)
    return guards


def test_guards_rebuilt_from_lines_equal_those_of_an_uninterrupted_run() -> None:
    kinds: list[dict[str, float]] = [
        {},
        {"reward": 0.0, "std": 0.0, "weight_change": 0.0},
        {"reward": 1.0, "std": 0.0, "weight_change": 0.0},
        {"weight_change": 0.0},
        {"loss": math.nan},
    ]
    lines = [line(step, **kinds[i]) for step, i in enumerate((0, 3, 1, 2, 2, 0, 4, 0, 1, 1, 3, 4), 1)]
    for done in range(len(lines)):
        written = [json.loads(json.dumps(without_nan(each), allow_nan=False)) for each in lines[:done]]
        assert Guards.after(written) == followed(lines[:done])
    found = followed(lines[:5])
    assert (found.silent, found.one_value, found.agreeing) == (3, 4, 4), "those that are right don't count"
    assert (found.varied, found.recent, found.all_correct, found.unchanged) == (True, ((4, 0.5),) * 2, 2, (2,))
    assert Guards.after(lines[:5], ended=True) == Guards(varied=True, recent=found.recent)


def test_rollouts_and_their_line_say_the_same() -> None:
    for values in (
        [(0, 0), (1, 1)],
        [(0, 1), (1, 1)],
        [(0, 0), (0, 0)],
        [(0,), (1,)],
        [(1,), (1,)],
        [(0, 0), (None, 1)],
    ):
        rollouts = [rollout(v, group=str(g)) for g, group in enumerate(values) for v in group]
        scored = [r.value for r in rollouts if r.value is not None]
        groups = [{v for v in group if v is not None} for group in values]
        of_line = Signal.of(
            {
                "rollouts": len(rollouts),
                "failures": {"reward-invalid": len(rollouts) - len(scored)},
                "reward_std": statistics.pstdev(scored),
                "accuracy": sum(scored) / len(scored),
                "reward": sum(scored) / len(scored),
                "groups": len(groups),
                "zero_variance_groups": statistics.fmean(len(found) == 1 for found in groups),
            }
        )
        assert Signal.of(reward_figures(rollouts)) == of_line, values


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_updates_that_are_not_finite_are_warned_of_and_end_the_run_if_repeated(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    followed([line(1, **{name: math.nan}), line(2, **{name: 2.0}), line(3, **{name: math.nan})])
    said = "loss nan" if name == "loss" else "grad_norm nan"
    assert [m.split(";")[0] for m in caplog.messages] == [f"step 1: {said}", f"step 3: {said}"]
    with pytest.raises(RunStopped, match=rf"steps 1 and 2: {said.replace('nan', 'inf')}: updates with such gradients"):
        followed([line(1, loss=math.nan), line(2, **{name: math.inf})])


@pytest.mark.parametrize("change", [math.nan, math.inf])
def test_weights_that_are_not_finite(change: float) -> None:
    with pytest.raises(RunStopped, match=r"step 3: the weight change is (nan|inf): training has diverged. Lower"):
        followed([line(1), line(2), line(3, weight_change=change)])


def test_weights_that_do_not_change() -> None:
    with pytest.raises(
        RunStopped,
        match=r"^steps 4 and 5 changed no weight, although rewards differ within groups. Is the learning rate 0",
    ):
        followed([line(3), line(4, weight_change=0.0), line(5, weight_change=0.0)])
    followed([line(1, weight_change=0.0), line(2), line(3, weight_change=0.0)])
    followed([line(1, weight_change=0.0), line(2, weight_change=0.0, std=0.0), line(3)])
    with pytest.raises(RunStopped, match="steps 1 and 3 changed"):  # the equal rewards between them don't count
        followed([line(1, weight_change=0.0), line(2, weight_change=0.0, std=0.0), line(3, weight_change=0.0)])


def test_steps_without_a_signal_are_not_steps_that_change_no_weight() -> None:
    """The run of issue 37: two steps in a row whose groups had no variance, at 25 to 50% accuracy."""
    agreed = {**line(2, weight_change=0.0), "zero_variance_groups": 1.0, "accuracy": 0.25}
    followed([line(1), agreed, {**agreed, "step": 3}, {**agreed, "step": 4}, line(5)])
    left_out = line(2, weight_change=0.0, trained_tokens=0.0)  # no call of the groups that differ is trained
    followed([line(1), left_out, {**left_out, "step": 3}])


def groups_of(value: float | None, groups: int, **more: Any) -> list[Rollout]:
    return [rollout(value, group=str(g), **more) for g in range(groups) for _ in range(2)]


def test_equal_rewards_end_a_run_in_its_first_step_or_if_repeated() -> None:
    with pytest.raises(RunStopped, match="step 1: all 70 rollouts got the reward 0"):
        Guards().check_signal(groups_of(0.0, 35), step=1)
    assert not Guards().check_signal(groups_of(0.0, 34), step=1)
    with pytest.raises(RunStopped, match="step 1: all 100 rollouts got the reward 1"):
        Guards().check_signal(groups_of(1.0, 50), step=1)
    with pytest.raises(RunStopped, match=r"step 1: all 4 rollouts (.|\n)* the answer to task t was null"):
        Guards().check_signal(groups_of(0.0, 2, answer=None), step=1)
    known = Guards(varied=True, one_value=30, silent=3, all_correct=1)
    assert not known.check_signal(groups_of(0.0, 4), step=9)
    with pytest.raises(
        RunStopped,
        match=r"step 9: all 10 rollouts got the reward 0.*\n  In none of the last 4 steps",
    ):
        known.check_signal(groups_of(0.0, 5), step=9)
    easy = Guards(varied=True, one_value=30, recent=((100, 0.9),))
    assert not easy.check_signal(groups_of(0.0, 50), step=9), "groups of this run often agree"
    solved = Guards(varied=True, all_correct=2)
    assert solved.check_signal(groups_of(1.0, 4), step=4)
    assert not solved.check_signal([rollout(0.0), rollout(1.0)], step=4)
    assert not Guards(all_correct=2).check_signal(groups_of(1.0, 4), step=3), "a reward may ignore the answer"


def test_rewards_of_calls_that_are_learned_from_are_a_signal() -> None:
    """The credit `turn` learns from calls where all rollouts of a group have one reward."""
    called = [
        attrs.evolve(each, score=attrs.evolve(Score.ok(0.0), calls=(i % 2, 0.5)))
        for i, each in enumerate(groups_of(0.0, 40))
    ]
    assert reward_figures(called)["unlike_calls"] == 1
    learned = {**line(1, 0.0, std=0.0), "groups": 40, "unlike_calls": 1.0, "untaught_groups": 0.25}
    guards = followed([learned, {**learned, "step": 2}])
    assert (guards.varied, guards.silent, guards.recent) == (True, 0, ((40, 0.25),) * 2)
    assert not guards.check_signal(called, step=3)
    assert not Guards().check_signal(called, step=1), "what the credit does with them is not known yet"
    ignored = followed([{**learned, "untaught_groups": 1.0}])
    with pytest.raises(RunStopped, match="step 2: all 80 rollouts got the reward 0"):
        ignored.check_signal(called, step=2)
    with pytest.raises(RunStopped, match="step 3: all 80 rollouts got the reward 0"):
        guards.check_signal(groups_of(0.0, 40), step=3)
    solved = [{**learned, "step": step, "accuracy": 1.0} for step in (1, 2, 3)]
    assert not followed(solved).solved, "calls still have something to teach"


# --- whole runs -----------------------------------------------------------------------------------

MIXED, RIGHT, WRONG = ("", ""), ("even", ""), ("", "even")
"""The behavior of the agents for even and odd numbers: the model always answers `odd`."""

SMALL = ["run.validation_tasks=1", "run.report_tasks=2"]


def tasks_of(*steps: tuple[str, str]) -> str:
    """Return the setting that gives the rollouts of steps 1 to 4 these results."""
    do = [""] * 24
    for step, (even, odd) in enumerate(steps, 1):
        for i in range(6):
            do[(6 * step + i) % 24] = odd if (6 * step + i) % 2 else even
    return f"tasks.do={json.dumps(do)}"


def resumed_after(make: MakePlan, step: int, *setting: str) -> dict[str, Any]:
    """Run until a step has ended, interrupt, and resume; return the final summary."""
    plan = make(*setting, f"algorithm.cut_after={step}")
    with pytest.raises(ConnectionAbortedError):
        train(plan)
    run = Path(plan.run.directory) / plan.run.name
    assert len((run / "metrics.jsonl").read_text().splitlines()) == step
    return train(resume_plan(run, overrides=["algorithm.cut_after=0"]), resume=run)


@pytest.mark.parametrize(
    ("steps", "more", "said"),
    [
        ((WRONG,) * 4, [], "step 6: all 12 rollouts got the reward 0"),
        ((MIXED,) * 4, ["algorithm.figures.grad_norm=nan"], "steps 1 and 2: grad_norm nan"),
    ],
)
@pytest.mark.slow
def test_a_resumed_run_stops_where_an_uninterrupted_one_does(
    model: ModelServer, toy_plan: MakePlan, tmp_path: Path, steps: Sequence[tuple[str, str]], more: list[str], said: str
) -> None:
    setting = ["algorithm.steps=6", tasks_of(*steps), f"tasks.marker={tmp_path}", *SMALL, *more]
    with pytest.raises(RunStopped, match=said):
        train(toy_plan(*setting, "run.name=whole"))
    with pytest.raises(RunStopped, match=said):
        resumed_after(toy_plan, 3 if "step 6" in said else 1, *setting)


@pytest.mark.slow
def test_a_run_that_has_solved_its_tasks_ends_normally(
    model: ModelServer, toy_plan: MakePlan, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    setting = ["algorithm.steps=40", "algorithm.change=0.0", tasks_of(MIXED, RIGHT, RIGHT, RIGHT), *SMALL]
    setting.append("run.block=[]")
    with caplog.at_level("INFO", logger="agentrig"):
        summary = train(toy_plan(*setting, "run.name=whole"))
    assert (summary["solved"], summary["complete"], summary["steps"]) == (True, True, 4)
    assert summary["accuracy"]["after"] is not None
    assert "step 4: every rollout was correct in 3 steps running: the tasks are solved" in caplog.text

    assert resumed_after(toy_plan, 2, *setting)["steps"] == 4
    run = tmp_path / "runs" / "toy"
    assert (run / "report.html").is_file()

    # Interrupted between the last step and the measurement after it, only that measurement is left.
    (run / "summary.json").unlink()
    again = train(resume_plan(run), resume=run)
    assert (again["steps"], again["solved"], again["accuracy"]) == (4, True, summary["accuracy"])

    # With more steps it continues training.
    longer = train(resume_plan(run, overrides=["algorithm.steps=6", "algorithm.change=1.0"]), resume=run)
    assert (longer["steps"], longer["solved"]) == (6, False)
