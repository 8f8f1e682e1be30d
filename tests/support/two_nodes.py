"""A plugin file: an agent with two nodes that also calls another server, has failing calls, and fails itself."""

from __future__ import annotations

import os

import attrs
import httpx

import agentrig
from agentrig import AgentFailure, AgentSpec, hookimpl


def two_nodes(task_input, endpoint):
    """Call the model in one node, check in another; the task decides what else happens."""
    from toy_plugin import ask

    number = task_input["number"]
    with agentrig.span("write_query"):
        answer = ask(endpoint, f"Is {number} odd?")
        if number % 3 == 0:
            ask(attrs.evolve(endpoint, base_url=os.environ["OTHER_SERVER"]), "And you?")
        if number % 4 == 0:
            try:
                ask(endpoint, "[status=503]")
            except httpx.HTTPStatusError:
                ask(endpoint, "[no-ids] again?")
    with agentrig.span("check_query"):
        ask(endpoint, f"Is {answer} right?")
    if number % 6 == 5:
        raise AgentFailure("there is no plan", kind="no-plan")
    return answer


@hookimpl
def register_agents():
    yield AgentSpec(
        name="two-nodes", summary="Asks and checks.", build=lambda config: two_nodes, environment=("OTHER_SERVER",)
    )
