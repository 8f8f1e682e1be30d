"""Tests what `order-desk` does."""

from typing import Any

import pytest
from agentrig_order_desk import DAYS, ITEMS, Agent, AgentConfig, Tasks, TasksConfig, score

from agentrig import Outcome, Span, Task, Trace
from agentrig.demonstrations import Reply as Said
from agentrig.testing.scripted import Reply, ScriptedServer
from agentrig.traces import LLM_CALL


def played(*replies: Any) -> Trace:
    """Return the trace of an agent whose model made these calls of tools in each reply."""
    spans = []
    for i, calls in enumerate(replies):
        message = Said(tool_calls=[{"name": name, "arguments": arguments} for name, arguments in calls]).message()
        response = {"response": {"choices": [{"message": message}]}}
        spans.append(Span(id=f"{i}", parent=None, name=LLM_CALL, start=i, end=i + 1, attributes=response))
    return Trace(rollout_id="r", spans=spans)


def test_an_order_is_taken_and_scored(scripted_server: ScriptedServer) -> None:
    item, (day, *_, asked) = ITEMS[0], DAYS
    calls = [("add", {"item": f"no {item}", "count": 2}), ("add", {"item": item, "count": 2})]
    scripted_server.script = [Reply(tool_calls=calls), Reply(tool_calls=[("deliver", {"day": day})])]
    order = Agent(AgentConfig())({"message": f"2 {item} on {asked}"}, scripted_server.endpoint())
    assert order == {"item": item, "count": 2, "day": day}
    assert "error: an item" in str(scripted_server.bodies()[1])
    task = Task(id="t", input={}, private={"gold": {**order, "day": asked}})
    trace = played(calls[:1], calls[1:], [("deliver", {"day": day})])
    found = score(task, Outcome(answer=order), 1.0, trace)
    assert found.value == pytest.approx(1 / 3)
    assert found.calls == pytest.approx([0, 2 / 3, 2 / 3])
    assert score(task, Outcome(answer=task.private["gold"]), 1.0, trace).correct


def test_no_order_is_in_two_splits() -> None:
    tasks = Tasks(TasksConfig())
    orders = [[str(task.private["gold"]) for task in tasks.load(split)] for split in tasks.splits]
    assert sum(map(len, orders)) == len(set().union(*orders))
