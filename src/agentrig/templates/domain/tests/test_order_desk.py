"""Tests what `order-desk` does."""

import pytest
from agentrig_order_desk import DAYS, ITEMS, Agent, AgentConfig, Tasks, TasksConfig, score

from agentrig import Outcome, Task
from agentrig.testing.scripted import Reply, ScriptedServer


def test_an_order_is_taken_and_scored(scripted_server: ScriptedServer) -> None:
    item, (day, *_, asked) = ITEMS[0], DAYS
    calls = [("add", {"item": f"no {item}", "count": 2}), ("add", {"item": item, "count": 2})]
    scripted_server.script = [Reply(tool_calls=calls), Reply(tool_calls=[("deliver", {"day": day})])]
    order = Agent(AgentConfig())({"message": f"2 {item} on {asked}"}, scripted_server.endpoint())
    assert order == {"item": item, "count": 2, "day": day}
    assert "error: an item" in str(scripted_server.bodies()[1])
    task = Task(id="t", input={}, private={"gold": {**order, "day": asked}})
    assert score(task, Outcome(answer=order), 1.0).value == pytest.approx(1 / 3)
    assert score(task, Outcome(answer=task.private["gold"]), 1.0).correct


def test_no_order_is_in_two_splits() -> None:
    tasks = Tasks(TasksConfig())
    orders = [[str(task.private["gold"]) for task in tasks.load(split)] for split in tasks.splits]
    assert sum(map(len, orders)) == len(set().union(*orders))
