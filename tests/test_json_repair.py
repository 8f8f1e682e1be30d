"""The example domain `json-repair`: its tasks, its reward, its agent with the demonstrations, and its recipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrig import Outcome, Task
from agentrig.plan import Plan, resolve
from agentrig.run.warmup import choose_labels, demonstrate
from agentrig.tasks import overlap

SOURCE = Path(__file__).resolve().parents[1] / "examples" / "agentrig-json-repair" / "src"


@pytest.fixture(scope="module")
def plan() -> Iterator[Plan]:
    sys.path.insert(0, str(SOURCE))
    yield resolve(
        "json-repair", overrides=["runners.n=1"], files=[str(SOURCE / "agentrig_json_repair" / "__init__.py")]
    )
    sys.path.remove(str(SOURCE))


@pytest.fixture(scope="module")
def splits(plan: Plan) -> dict[str, Any]:
    tasks = plan.build("tasks")
    return {split: tasks.load(split) for split in tasks.splits}


def test_tasks_are_the_same_each_time_and_in_one_split_only(plan: Plan, splits: dict[str, Any]) -> None:
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 4000, "validation": 200, "test": 400}
    assert plan.build("tasks").load("test") == splits["test"]
    ids = [t.id for rows in splits.values() for t in rows]
    assert len(set(ids)) == len(ids)
    assert overlap(splits["train"], [*splits["validation"], *splits["test"]]) == []
    assert overlap(splits["validation"], splits["test"]) == []
    assert splits["test"][7].id == "test-0-0007"


def test_gold_is_right_and_the_document_itself_is_not(plan: Plan, splits: dict[str, Any]) -> None:
    reward = plan.build("reward")
    for task in splits["test"]:
        gold = reward(task, Outcome(answer=task.private["gold"]), 1.0)
        assert (gold.value, gold.correct) == (1.0, True), task
        same = reward(task, Outcome(answer=json.dumps(task.input["document"])), 1.0)
        assert (same.value, same.correct) == (0.0, False), task


def test_the_reward_is_graded_and_no_shortcut_is_correct(plan: Plan) -> None:
    rules = {
        "age": {"type": "integer", "minimum": 1, "maximum": 9},
        "paid": {"type": "boolean"},
        "b": {"type": "string"},
    }
    schema = {"type": "object", "properties": rules, "required": [*rules], "additionalProperties": False}
    task = Task(id="t", input={"schema": schema, "document": {"age": 12, "paid": "true", "b": "x"}})

    def score(answer: Any) -> tuple[float | None, bool | None]:
        found = plan.build("reward")(task, Outcome(answer=answer), 1.0)
        return found.value, found.correct

    assert score('{"age": 9, "paid": false, "b": "x"}') == (1.0, True)
    assert score('{"age": 9, "paid": "true", "b": "x"}') == (0.25, False)  # one of two faults
    assert score('{"age": 9, "paid": true, "b": "other"}') == (0.0, False)  # valid, but what was right has changed
    for wrong in ("{}", "[]", "{", None, 7, "[" * 100_000, '{"age": NaN}'):
        assert score(wrong) == (0.0, False), wrong


@pytest.mark.slow
def test_the_agent_takes_a_turn_for_each_error_and_its_demonstrations_are_right(plan: Plan) -> None:
    labels = choose_labels(plan, 12, seed=0)
    assert labels.split == "train"
    found = demonstrate(plan, labels.tasks)
    assert found.rejected == []
    assert 12 < len(found.turns) <= 36, "documents with several faults take several turns"
    for turn in found.turns:
        assert isinstance(json.loads(turn.reply.content), dict)
        assert "\nerror " in turn.messages[-1]["content"]
