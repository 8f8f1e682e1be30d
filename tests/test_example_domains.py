"""The example domains `units` and `json-repair`: tasks, tools and rewards, and the demonstrations of their agents."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentrig import Outcome, Task
from agentrig.plan import Plan, resolve
from agentrig.run.warmup import choose_labels, demonstrate
from agentrig.tasks import overlap
from agentrig.testing import check

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@contextmanager
def resolved(name: str) -> Iterator[Plan]:
    source = EXAMPLES / f"agentrig-{name}" / "src"
    sys.path.insert(0, str(source))
    file = source / f"agentrig_{name.replace('-', '_')}" / "__init__.py"
    try:
        yield resolve(name, overrides=["runners.n=1"], files=[str(file)])
    finally:
        sys.path.remove(str(source))


@pytest.fixture(scope="module")
def units() -> Iterator[Plan]:
    with resolved("units") as plan:
        yield plan


@pytest.fixture(scope="module")
def repair() -> Iterator[Plan]:
    with resolved("json-repair") as plan:
        yield plan


@pytest.fixture(scope="module")
def splits(repair: Plan) -> dict[str, Any]:
    tasks = repair.build("tasks")
    return {split: tasks.load(split) for split in tasks.splits}


def scored(plan: Plan, task: Task, answer: Any) -> tuple[float | None, bool | None]:
    found = plan.build("reward")(task, Outcome(answer=answer), 1.0)
    return found.value, found.correct


def test_tasks_and_reward_of_units_pass_the_kit(units: Plan) -> None:
    tasks = units.build("tasks")
    check("tasks", tasks)
    check("reward", units.build("reward"), tasks=tasks.load("test")[:20], gold="gold")
    assert tasks.load("test")[7].id == "test-0-0007"
    everything = [t for split in tasks.splits for t in tasks.load(split)]
    assert len({json.dumps(dict(t.private)) for t in everything}) == len(everything), "asked twice in other words"


def test_the_gold_is_what_the_tools_say(units: Plan) -> None:
    from agentrig_units.tools import calculate, factor

    for task in units.build("tasks").load("test"):
        private = task.private
        number, unit = private["gold"].split()
        assert calculate(private["expression"], unit) == f"{number} {unit}"
        assert factor(private["big"], private["small"]) in private["expression"]
        assert unit in (private["big"], private["small"])


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("factor", {"big": "feet", "small": "inches"}, "12"),
        ("factor", {"big": "inches", "small": "feet"}, "error: inches feet"),
        ("factor", {"big": "feet"}, "error: wrong arguments"),
        ("calculate", {"expression": "(3+4)*12/7", "unit": "feet"}, "12 feet"),
        ("calculate", {"expression": "1/0", "unit": "feet"}, "error"),
        ("calculate", {"expression": "9**9**9", "unit": "feet"}, "error"),
        ("calculate", {"expression": "__import__('os')", "unit": "feet"}, "error"),
        ("calculate", {"expression": "(" * 50, "unit": "feet"}, "error"),
        ("calculate", {"expression": "9" * 61, "unit": "feet"}, "error"),
        ("calculate", {"expression": 3, "unit": "feet"}, "error: text expected"),
        ("calculate", {"expression": "3"}, "error: wrong arguments"),
        ("add", {}, "error: no tool add"),
    ],
)
def test_tools_answer_every_call(units: Plan, name: str, arguments: dict[str, Any], result: str) -> None:
    from agentrig_units.tools import use

    assert use(name, json.dumps(arguments)) == result


def test_the_reward_of_units_is_graded(units: Plan) -> None:
    task = units.build("tasks").load("test")[0]
    number, unit = task.private["gold"].split()
    assert scored(units, task, f"{number} {unit}") == (1.0, True)
    assert scored(units, task, f"{number} miles") == (0.4, False)
    assert scored(units, task, f"0 {unit}") == (0.1, False)
    assert [scored(units, task, a) for a in ("", None, 7, number, "x " * 1000)] == [(0.0, False)] * 5


def test_tasks_of_json_repair_are_the_same_each_time_and_in_one_split_only(repair: Plan, splits: Any) -> None:
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 4000, "validation": 200, "test": 400}
    assert repair.build("tasks").load("test") == splits["test"]
    ids = [t.id for rows in splits.values() for t in rows]
    assert len(set(ids)) == len(ids)
    assert overlap(splits["train"], [*splits["validation"], *splits["test"]]) == []
    assert overlap(splits["validation"], splits["test"]) == []
    assert splits["test"][7].id == "test-0-0007"


def test_gold_is_right_and_the_document_itself_is_not(repair: Plan, splits: dict[str, Any]) -> None:
    for task in splits["test"]:
        assert scored(repair, task, task.private["gold"]) == (1.0, True), task
        assert scored(repair, task, json.dumps(task.input["document"])) == (0.0, False), task


def test_the_reward_of_json_repair_is_graded_and_no_shortcut_is_correct(repair: Plan) -> None:
    rules = {
        "age": {"type": "integer", "minimum": 1, "maximum": 9},
        "paid": {"type": "boolean"},
        "b": {"type": "string"},
    }
    schema = {"type": "object", "properties": rules, "required": [*rules], "additionalProperties": False}
    task = Task(id="t", input={"schema": schema, "document": {"age": 12, "paid": "true", "b": "x"}})
    assert scored(repair, task, '{"age": 9, "paid": false, "b": "x"}') == (1.0, True)
    assert scored(repair, task, '{"age": 9, "paid": "true", "b": "x"}') == (0.25, False)  # one of two faults
    assert scored(repair, task, '{"age": 9, "paid": true, "b": "other"}') == (0.0, False)  # valid, but changed
    for wrong in ("{}", "[]", "{", None, 7, "[" * 100_000, '{"age": NaN}'):
        assert scored(repair, task, wrong) == (0.0, False), wrong


@pytest.mark.slow
def test_demonstrations_of_units_use_both_tools_and_are_right(units: Plan) -> None:
    found = demonstrate(units, choose_labels(units, 12, seed=0).tasks)
    assert found.rejected == []
    names = [call["name"] for turn in found.turns for call in turn.reply.tool_calls]
    assert (len(found.turns), names) == (2 * 12, ["factor", "calculate"] * 12)
    last = found.turns[1]
    assert [m["role"] for m in last.messages] == ["user", "assistant", "tool"]
    assert [t["function"]["name"] for t in last.tools] == ["factor", "calculate"]


@pytest.mark.slow
def test_demonstrations_of_json_repair_take_a_turn_for_each_error_and_are_right(repair: Plan) -> None:
    labels = choose_labels(repair, 12, seed=0)
    assert labels.split == "train"
    found = demonstrate(repair, labels.tasks)
    assert found.rejected == []
    assert 12 < len(found.turns) <= 36, "documents with several faults take several turns"
    for turn in found.turns:
        assert isinstance(json.loads(turn.reply.content), dict)
        assert "\nerror " in turn.messages[-1]["content"]
