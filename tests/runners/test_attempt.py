"""What the message of a failed rollout says."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from agentrig.pools import Job
from agentrig.runners.attempt import run_agent
from agentrig.testing.scripted import Reply, scripted_server


def ask(task_input: Any, endpoint: Any) -> str:
    """Ask by plain httpx, or read the answer as a stream."""
    body = {"model": endpoint.model, "messages": [{"role": "user", "content": "?"}]}
    url = f"{endpoint.base_url}/chat/completions"
    if task_input["stream"]:
        with httpx.stream("POST", url, json=body) as reply:
            reply.raise_for_status()
    reply = httpx.post(url, json=body)
    reply.raise_for_status()
    return "unreached"


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_call_has_the_servers_answer_in_its_message(stream: bool) -> None:
    with scripted_server(Reply(status=400, text="this model's context is 64 tokens")) as server:
        found = run_agent(ask, Job(id="r", input={"stream": stream}, endpoint=server.endpoint()))
    assert found.outcome.failure == "llm-error"
    assert "400 Bad Request" in found.outcome.message
    assert "this model's context is 64 tokens" in found.outcome.message
