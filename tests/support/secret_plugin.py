"""An agent with a secret and declared variables that writes down what it sees, for the recipe `toy`."""

from __future__ import annotations

import os
from pathlib import Path

import attrs
import httpx

import agentrig
from agentrig import AgentSpec, Secret, hookimpl, setting


@attrs.frozen(kw_only=True)
class Config:
    api_key: Secret | None = setting(None, secret=True, help="the key of a tool")
    tell: str = setting("", help="a file that the agent writes what it sees into")
    fail: bool = setting(False, help="fail with the key in the message")


def build(config):
    def look(task_input, endpoint):
        key = config.api_key.reveal() if config.api_key else ""
        if config.tell:
            seen = Path("/proc/self/environ").read_text() + repr(dict(os.environ))
            Path(config.tell).write_text(f"key={key}\n{seen}")
        messages = [{"role": "user", "content": f"Is {task_input['number']} odd? My key is {key}, {config.api_key}"}]
        with agentrig.span("write_query"):
            reply = httpx.post(
                f"{endpoint.base_url}/chat/completions", json={"messages": messages, **endpoint.sampling}
            )
        if config.fail and task_input["number"] % 4 == 0:
            raise PermissionError(f"the tool does not know the key {key}")
        return reply.json()["choices"][0]["message"]["content"]

    return look


def build_eager(config):
    """Read a variable that it does not declare."""
    return os.environ["TOY_UNDECLARED"]


@hookimpl
def register_agents():
    declared = ("TOY_DECLARED", "TOY_KEYS_*")
    yield AgentSpec(name="look", summary="Looks around.", config=Config, build=build, environment=declared)
    yield AgentSpec(name="eager", summary="Cannot be built.", build=build_eager)
