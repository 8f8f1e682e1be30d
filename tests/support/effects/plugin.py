"""A plugin file for the effects of keys: an agent and tasks for training."""

from __future__ import annotations

import httpx

import agentrig
from agentrig import AgentSpec, Task, TasksSpec, hookimpl


def writer(task_input, endpoint):
    """Ask once; the answer is a number: the share of short tokens, or less of them where the task measures."""
    body = {
        "model": endpoint.model,
        "messages": [{"role": "user", "content": task_input["question"]}],
        "return_token_ids": True,
        **endpoint.sampling,
    }
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    with agentrig.span("write_query"):
        reply = httpx.post(f"{endpoint.base_url}/chat/completions", json=body, headers=headers, timeout=60)
    reply.raise_for_status()
    ids = reply.json()["choices"][0]["token_ids"]
    share = sum(i % 2 for i in ids) / len(ids)
    return share if task_input["split"] == "train" else -share


class Names:
    splits = ("train", "validation", "test")
    roles = {"train": "train", "validation": "validation", "report": "test"}  # noqa: RUF012

    def load(self, split):
        rows = [Task(id=f"{split}-{i}", input={"question": f"{split} {i}", "split": split}) for i in range(8)]
        return rows


@hookimpl
def register_agents():
    yield AgentSpec(name="effects-writer", summary="Writes.", build=lambda config: writer)


@hookimpl
def register_tasks():
    yield TasksSpec(name="effects-names", summary="Names.", build=lambda config: Names())
