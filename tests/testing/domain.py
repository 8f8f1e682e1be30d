"""A domain of one file: sums, an agent that asks for them, and a reward."""

from __future__ import annotations

import attrs
import httpx

import agentrig
from agentrig import AgentSpec, RewardSpec, Score, Task, TasksSpec, hookimpl


@attrs.frozen
class Sums:
    splits = ("train", "dev", "test")
    roles = {"train": "train", "validation": "dev", "report": "test"}  # noqa: RUF012

    def load(self, split):
        first = 100 * self.splits.index(split)
        numbers = [(first + i, 3 * i) for i in range(6)]
        return [
            Task(id=f"{split}-{a}", input={"question": f"{a} + {b}"}, private={"answer": str(a + b)})
            for a, b in numbers
        ]


def add(task_input, endpoint):
    body = {"model": endpoint.model, "messages": [{"role": "user", "content": task_input["question"]}]}
    headers = {"Authorization": f"Bearer {endpoint.api_key}", **endpoint.headers}
    with agentrig.span("solve"):
        url = f"{endpoint.base_url}/chat/completions"
        reply = httpx.post(url, json={**body, **endpoint.sampling}, headers=headers, timeout=60)
    reply.raise_for_status()
    return reply.json()["choices"][0]["message"]["content"] or ""


def equal(task, outcome, budget_s):
    """Give 1 for the right number."""
    return Score.ok(float(outcome.answer == task.private["answer"]))


@hookimpl
def register_tasks():
    yield TasksSpec(name="sums", summary="Sums.", build=lambda config: Sums())


@hookimpl
def register_agents():
    yield AgentSpec(name="adds", summary="Adds.", build=lambda config: add)


@hookimpl
def register_rewards():
    yield RewardSpec(name="equal", summary="Equal.", build=lambda config: equal)
