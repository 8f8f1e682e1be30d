"""A domain of one file: sums, an agent that asks for them, and a reward. A setting of each plants a mistake."""

from __future__ import annotations

import attrs
import httpx

import agentrig
from agentrig import AgentSpec, RewardSpec, Score, Task, TasksSpec, hookimpl, setting


@attrs.frozen(kw_only=True)
class Config:
    """Which mistake is planted."""

    mistake: str = setting("", help="which mistake")


@attrs.frozen
class Sums:
    """Sums of two numbers."""

    config: Config
    splits = ("train", "dev", "test")
    roles = {"train": "train", "validation": "dev", "report": "test"}  # noqa: RUF012

    def load(self, split):
        """Return the tasks."""
        first = 100 * self.splits.index(split)
        return [self.task(split, first + i, 3 * i) for i in range(6)]

    def task(self, split, a, b):
        """Return a task."""
        hint = {"hint": str(a + b)} if self.config.mistake == "leaks" else {}
        return Task(id=f"{split}-{a}", input={"question": f"{a} + {b}", **hint}, private={"answer": str(a + b)})


@attrs.frozen
class Adds:
    """Asks once."""

    config: Config

    def __call__(self, task_input, endpoint):
        """Answer."""
        body = {"model": endpoint.model, "messages": [{"role": "user", "content": task_input["question"]}]}
        body |= {} if self.config.mistake == "cold" else endpoint.sampling
        headers = {"Authorization": f"Bearer {endpoint.api_key}", **endpoint.headers}
        url = "http://127.0.0.1:9/v1" if self.config.mistake == "elsewhere" else endpoint.base_url
        with agentrig.span("solve"):
            reply = httpx.post(f"{url}/chat/completions", json=body, headers=headers, timeout=60)
        reply.raise_for_status()
        text = reply.json()["choices"][0]["message"]["content"] or ""
        return f"I think that it is {text}" if self.config.mistake == "chats" else text


@attrs.frozen
class Equal:
    """1 for the right number."""

    config: Config

    def __call__(self, task, outcome, budget_s):
        """Score an answer."""
        return Score.ok(1.0 if self.config.mistake == "flat" else float(outcome.answer == task.private["answer"]))


@hookimpl
def register_tasks():
    yield TasksSpec(name="sums", summary="Sums.", config=Config, build=Sums)


@hookimpl
def register_agents():
    yield AgentSpec(name="adds", summary="Adds.", config=Config, build=Adds)


@hookimpl
def register_rewards():
    yield RewardSpec(name="equal", summary="Equal.", config=Config, build=Equal)
