"""Runs the checks of `agentrig.testing` on each part of `order-desk`, and a test of its own."""

import pytest
from agentrig_order_desk import Agent, AgentConfig, score

from agentrig import Outcome, Task
from agentrig.testing import Check, checks
from agentrig.testing.scripted import Reply, ScriptedServer

PARTS = {"tasks": {}, "agent": {"tasks": "order-desk"}, "reward": {"tasks": "order-desk"}}
CHECKS = [check for kind, more in PARTS.items() for check in checks(kind, "order-desk", **more)]


@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_the_contract(check: Check) -> None:
    check()


def test_an_order_is_taken_and_scored(scripted_server: ScriptedServer) -> None:
    calls = [("add", {"item": "pens", "count": 2}), ("add", {"item": "moons", "count": 1})]
    scripted_server.script = [Reply(tool_calls=calls), "done"]
    order = Agent(AgentConfig())({"message": "2 pens and 3 cups"}, scripted_server.endpoint())
    assert order == {"pens": 2}
    assert "error: the items are" in str(scripted_server.bodies()[1])
    task = Task(id="t", input={}, private={"gold": {"pens": 2, "cups": 3}})
    assert score(task, Outcome(answer=order), 1.0).value == 0.25
    assert score(task, Outcome(answer={"cups": 3, "pens": 2}), 1.0).correct
