"""The agent `units`: lets the model use its tools until the calculator has the answer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import attrs

import agentrig
from agentrig import Endpoint, Task, setting
from agentrig.demonstrations import Call, Reply
from agentrig_units.tools import TOOLS, use


@attrs.frozen(kw_only=True)
class AgentConfig:
    """Settings of the agent."""

    turns: int = setting(3, help="how often it asks the model at most", ge=1, le=10)


@lru_cache(maxsize=8)
def client_of(base_url: str, api_key: str) -> Any:
    """Return a client for a server; kept, because making one takes longer than a call."""
    from openai import OpenAI

    return OpenAI(base_url=base_url, api_key=api_key)


def convert(task_input: Mapping[str, Any], endpoint: Endpoint, *, turns: int) -> str:
    """Return the calculator's first result, or the model's first reply without a call; '' if there is neither."""
    messages: list[Any] = [{"role": "user", "content": task_input["question"]}]
    client = client_of(endpoint.base_url, endpoint.api_key)
    for _ in range(turns):
        with agentrig.span("assistant"):
            reply = client.chat.completions.create(
                model=endpoint.model,
                messages=messages,
                tools=list(TOOLS),
                extra_body=dict(endpoint.sampling),
                extra_headers=dict(endpoint.headers),
            )
        message = reply.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = use(call.function.name, call.function.arguments)
            if call.function.name == "calculate" and not result.startswith("error"):
                return result
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


def demonstrate(task: Task, call: Call) -> Reply:
    """Return the right reply to a call: look the factor up, then calculate."""
    private = task.private
    if call.turn == 0:
        return Reply(tool_calls=[{"name": "factor", "arguments": {"big": private["big"], "small": private["small"]}}])
    arguments = {"expression": private["expression"], "unit": private["gold"].split()[1]}
    return Reply(tool_calls=[{"name": "calculate", "arguments": arguments}])
