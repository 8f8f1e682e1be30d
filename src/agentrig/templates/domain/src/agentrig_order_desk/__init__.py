"""The domain `order-desk`: an assistant that takes orders with a tool."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

import agentrig
from agentrig import AgentSpec, Endpoint, Outcome, RecipeSpec, RewardSpec, Score, Task, TasksSpec, hookimpl, setting
from agentrig.demonstrations import Call, Reply

ITEMS = ("pens", "cups", "lamps", "books", "chairs", "plants")
WORDINGS = ("please send {}", "we need {}", "order {} for me", "add {} to the cart")
SIZES: Mapping[str, int] = {"train": 320, "validation": 32, "test": 96}
ROLES: Mapping[str, str] = {"train": "train", "validation": "validation", "report": "test"}

ADD: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add an item to the order.",
        "parameters": {
            "type": "object",
            "properties": {"item": {"type": "string", "enum": list(ITEMS)}, "count": {"type": "integer"}},
            "required": ["item", "count"],
        },
    },
}


@attrs.frozen(kw_only=True)
class TasksConfig:
    """The settings of the tasks: `[tasks]` of a run file."""

    seed: int = setting(0, help="another seed makes other tasks")


class Tasks:
    """The task set: what a customer writes (`input`), and the right order (`private`, for the reward only)."""

    splits: Sequence[str] = tuple(SIZES)
    roles: Mapping[str, str] = ROLES

    def __init__(self, config: TasksConfig) -> None:
        self.config = config

    def load(self, split: str) -> Sequence[Task]:
        """Return the split's tasks; no order is in two splits."""
        rng, seen = random.Random(self.config.seed), set[str]()
        for name, size in SIZES.items():
            tasks: list[Task] = []
            while len(tasks) < size:
                gold = {item: rng.randint(1, 4) for item in rng.sample(ITEMS, rng.randint(1, 2))}
                text = " and ".join(f"{count} {item}" for item, count in gold.items())
                if text not in seen:
                    seen.add(text)
                    said = {"message": rng.choice(WORDINGS).format(text)}
                    tasks.append(Task(id=f"{name}-{len(tasks):04}", input=said, private={"gold": gold}))
            if name == split:
                break
        return tasks

    def demonstrate(self, task: Task, call: Call) -> Reply:
        """Return the right reply to a call of the agent, for `agentrig warmup` and `agentrig validate`."""
        lines = list(task.private["gold"].items())
        if call.turn == len(lines):
            return Reply(content="done")
        item, count = lines[call.turn]
        return Reply(tool_calls=[{"name": "add", "arguments": {"item": item, "count": count}}])


@attrs.frozen(kw_only=True)
class AgentConfig:
    """The settings of the agent: `[agent]` of a run file."""

    turns: int = setting(4, help="how often it asks the model at most", ge=1)


@attrs.frozen
class Agent:
    """The agent: called once for each rollout, in several threads at once."""

    config: AgentConfig

    def __call__(self, task_input: Mapping[str, Any], endpoint: Endpoint) -> dict[str, int]:
        """Return the order when the model says something without a call of the tool."""
        from openai import OpenAI

        order: dict[str, int] = {}
        messages: list[Any] = [{"role": "user", "content": task_input["message"]}]
        client: Any
        with OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            for _ in range(self.config.turns):
                with agentrig.span("assistant"):  # so that the adapter's match finds the call
                    reply = client.chat.completions.create(
                        model=endpoint.model,
                        messages=messages,
                        tools=[ADD],
                        extra_body=dict(endpoint.sampling),
                        extra_headers=dict(endpoint.headers),
                    )
                message = reply.choices[0].message
                if not message.tool_calls:
                    break
                messages.append(message.model_dump(exclude_none=True))
                for call in message.tool_calls:
                    said = add(order, call.function.name, call.function.arguments)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
        return order


def add(order: dict[str, int], name: str, arguments: str) -> str:
    """Do a call of the tool; return what the model reads. A wrong call is an answer too, not an error."""
    try:
        asked = json.loads(arguments)
        item, count = str(asked["item"]), int(asked["count"])
    except (ValueError, TypeError, KeyError):
        return "error: write item and count"
    if name != "add" or item not in ITEMS:
        return f"error: the items are {', '.join(ITEMS)}"
    order[item] = count
    return f"{count} {item}"


def score(task: Task, outcome: Outcome, budget_s: float) -> Score:
    """Return 1 for the right order, less for one that is partly right; a right item with a wrong count is."""
    gold, order = task.private["gold"], outcome.answer if isinstance(outcome.answer, dict) else {}
    right = [1.0 if gold[item] == order[item] else 0.4 for item in gold if item in order]
    share = sum(right) / len({*gold, *order})
    return Score.ok(1.0 if share == 1 else share / 2, correct=share == 1, lines=share)


SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "tasks": {"use": "order-desk"},
    "agent": {"use": "order-desk"},
    "reward": {"use": "order-desk"},
    "adapter": {"use": "agent-match", "match": "assistant"},
    "algorithm": {"use": "grpo", "model": "models/order-desk", "steps": 30, "tasks_per_step": 32, "max_tokens": 48},
    "runners": {"n": 2, "threads": 16},
}
"""The recipe, as a run file has it. `agentrig warmup order-desk` makes its starting model."""


@hookimpl
def register_tasks() -> Iterable[TasksSpec]:
    """Bring the tasks."""
    yield TasksSpec(name="order-desk", summary="Orders of a customer.", config=TasksConfig, build=Tasks)


@hookimpl
def register_agents() -> Iterable[AgentSpec]:
    """Bring the agent."""
    yield AgentSpec(name="order-desk", summary="Fills an order with a tool.", config=AgentConfig, build=Agent)


@hookimpl
def register_rewards() -> Iterable[RewardSpec]:
    """Bring the reward."""
    yield RewardSpec(name="order-desk", summary="Right lines of an order.", build=lambda config: score)


@hookimpl
def register_recipes() -> Iterable[RecipeSpec]:
    """Bring the recipe."""
    yield RecipeSpec(name="order-desk", summary="Learns to take orders, on two cores.", settings=SETTINGS)
