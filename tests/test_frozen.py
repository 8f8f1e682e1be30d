"""What observers get cannot be changed, is independent of the original, and reads like it."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from model_server import ModelServer

from agentrig import Score, Task, hookimpl
from agentrig.errors import AgentFailure
from agentrig.frozen import frozen
from agentrig.observers import RunError, StepEnd
from agentrig.plan import Plan
from agentrig.processes.ends import Interrupted
from agentrig.rollouts import Rollout
from agentrig.run.training import train
from agentrig.testing.run_directory import rollout_of

MakePlan = Callable[..., Plan]

VALUES = {"a": 1.5, "list": [1, {"b": [2]}], "tuple": ({"c": 3},), "none": None, "set": {4}}

CHANGES: list[Callable[[Any], Any]] = [
    lambda v: v.pop("a"),
    lambda v: v.update(a=2),
    lambda v: v.__setitem__("a", 2),
    lambda v: v["list"].append(1),
    lambda v: v["list"].__iadd__([1]),
    lambda v: v["list"][1]["b"].append(1),
    lambda v: v["tuple"][0].clear(),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_frozen_value_cannot_be_changed_at_any_depth(change: Callable[[Any], Any]) -> None:
    value = frozen(VALUES)
    with pytest.raises(TypeError, match=r"read-only copies; copy\.deepcopy gives one"):
        change(value)
    assert value == VALUES
    change(copy.deepcopy(value))
    assert value == VALUES


def test_a_frozen_value_reads_as_the_original() -> None:
    plain = {k: v for k, v in VALUES.items() if k != "set"}
    value = frozen(plain)
    assert json.dumps(value) == json.dumps(plain)
    for again in (copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert again == plain
        assert (type(again), type(again["list"]), type(again["list"][1])) == (dict, list, dict)
    event = frozen(StepEnd(step=1, metrics=plain))
    assert isinstance(event, StepEnd)
    assert json.dumps(attrs.asdict(event)) == json.dumps({"step": 1, "metrics": plain})


def test_a_frozen_rollout_is_a_rollout_and_a_full_copy() -> None:
    made = rollout_of(3, right=True, mode="train", step=2, turns=2)
    original = attrs.evolve(made, score=Score(status="ok", value=1.0, details={"rows": [1]}))
    kept = copy.deepcopy(original)
    rollout = frozen(original)
    assert isinstance(rollout, Rollout)
    assert (rollout.value, rollout.correct, rollout.failure) == (1.0, True, None)
    assert attrs.asdict(rollout) == attrs.asdict(original)
    assert copy.deepcopy(rollout) == pickle.loads(pickle.dumps(rollout)) == original
    call = rollout.trace.llm_calls()[0]
    for change in (
        lambda: rollout.task.input.update(question="?"),
        lambda: rollout.task.private.clear(),
        lambda: rollout.score.details["rows"].append(2),
        lambda: call.attributes["prompt_token_ids"].append(2),
        lambda: call.attributes["request"]["messages"][0].update(role="system"),
    ):
        with pytest.raises(TypeError, match="read-only copies"):
            change()
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        rollout.task = Task(id="x", input={})
    dict.clear(rollout.task.input)  # even this changes only a copy
    list.clear(call.attributes["prompt_token_ids"])
    assert original == kept


def test_values_other_than_json_are_copied() -> None:
    array = bytearray(b"ab")
    lock = threading.Lock()
    error = AgentFailure("no plan", kind="no-plan")
    found = frozen({"array": array, "lock": lock, "error": error, "path": Path("x")})
    found["array"].append(3)
    stopped = frozen(RunError(directory=Path("x"), error=Interrupted(2, "interrupted by Ctrl-C"))).error
    assert (type(stopped), str(stopped), stopped.exit_status) == (Interrupted, "interrupted by Ctrl-C", 130)
    found["error"].args = ("changed",)
    assert (array, str(error)) == (b"ab", "no plan")
    assert (found["lock"], found["path"], found["error"].kind) == (repr(lock), Path("x"), "no-plan")


class Meddler:
    """An observer that changes everything it gets, after it has recorded that it could read it."""

    def __init__(self) -> None:
        self.read: set[str] = set()

    def meddle(self, name: str, *values: Any) -> None:
        json.dumps(values)
        self.read.add(name)
        for value in values:
            value.clear()

    @hookimpl
    def on_run_start(self, event: Any) -> None:
        self.meddle("start", event.config)

    @hookimpl
    def on_rollout_end(self, rollout: Any) -> None:
        self.meddle("rollout", rollout.task.input)

    @hookimpl
    def on_step_end(self, event: Any) -> None:
        self.read.add("step")
        event.metrics.pop("time_s")

    @hookimpl
    def on_run_end(self, event: Any) -> None:
        self.meddle("end", event.summary)

    @hookimpl
    def on_run_error(self, event: Any) -> None:
        self.read.add("error")
        event.error.args = ("all is well",)


def test_an_observer_cannot_change_a_run(model: ModelServer, toy_plan: MakePlan, tmp_path: Path) -> None:
    plan = toy_plan("algorithm.steps=1", "algorithm.report=false", "run.validation_tasks=1", "run.block=[]")
    meddler = Meddler()
    plan.registry.add_observer(meddler, "meddler")
    summary = train(plan)
    assert meddler.read == {"start", "rollout", "step", "end"}
    assert summary["observer_errors"] == {"meddler": 1 + 13 + 1}
    assert summary["steps"] == 1
    run = tmp_path / "runs" / "toy"
    assert "update" in json.loads((run / "metrics.jsonl").read_text())["time_s"]
    assert json.loads((run / "summary.json").read_text()) == summary
    assert (run / "report.html").is_file()


def test_an_observer_cannot_change_what_ended_a_run(model: ModelServer, toy_plan: MakePlan, tmp_path: Path) -> None:
    plan = toy_plan("algorithm.report=false", "algorithm.steps=1", "reward.right=0")
    plan.registry.add_observer(Meddler(), "meddler")
    with pytest.raises(Exception, match="got the reward 0"):
        train(plan)
    assert "got the reward 0" in json.loads((tmp_path / "runs" / "toy" / "error.json").read_text())["message"]
