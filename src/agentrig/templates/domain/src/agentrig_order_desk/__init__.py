"""The domain `order-desk`: an assistant that takes orders with two tools."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import attrs

import agentrig
from agentrig import AgentSpec, Endpoint, Outcome, RecipeSpec, RewardSpec, Score, Task, TasksSpec, hookimpl, setting
from agentrig.demonstrations import Call, Reply
from agentrig.traces import Trace, message_of

ITEMS = ("pens", "cups", "lamps", "books", "chairs", "plants", "towels", "clocks", "bags", "boards", "desks", "shirts")
DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
WORDINGS = (
    "please send {count} {item} on {day}",
    "on {day} we need {count} {item}",
    "we need {item} , {count} of them , by {day}",
    "for {day} : {count} {item} please",
)
SIZES: Mapping[str, int] = {"train": 480, "validation": 64, "test": 200}
ROLES: Mapping[str, str] = {"train": "train", "validation": "validation", "report": "test"}


def tool(name: str, **arguments: str) -> Any:
    """Return a tool as the model is shown it, with the JSON types of its arguments. A small model needs no more."""
    parameters = {"type": "object", "properties": {key: {"type": kind} for key, kind in arguments.items()}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = (tool("add", item="string", count="integer"), tool("deliver", day="string"))


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
        """Return the split's tasks; no order is in two splits, not even in other words."""
        rng = random.Random(self.config.seed)
        orders = list(itertools.product(ITEMS, range(1, 10), DAYS))
        rng.shuffle(orders)
        tasks: list[Task] = []
        for name, size in SIZES.items():
            tasks, orders, chosen = [], orders[size:], orders[:size]
            for item, count, day in chosen:
                gold = {"item": item, "count": count, "day": day}
                said = {"message": rng.choice(WORDINGS).format(**gold)}
                tasks.append(Task(id=f"{name}-{len(tasks):04}", input=said, private={"gold": gold}))
            if name == split:
                break
        return tasks

    def demonstrate(self, task: Task, call: Call) -> Reply:
        """Return the right reply to a call of the agent, for `agentrig warmup` and `agentrig validate`."""
        name, keys = [("add", ("item", "count")), ("deliver", ("day",))][min(call.turn, 1)]
        return Reply(tool_calls=[{"name": name, "arguments": {key: task.private["gold"][key] for key in keys}}])


@attrs.frozen(kw_only=True)
class AgentConfig:
    """The settings of the agent: `[agent]` of a run file."""

    turns: int = setting(3, help="how often it asks the model at most", ge=1)


@lru_cache(maxsize=64)
def client_of(base_url: str, api_key: str) -> Any:
    """Return a client for a server; kept, because making one takes longer than a call."""
    from openai import OpenAI

    return OpenAI(base_url=base_url, api_key=api_key)


@attrs.frozen
class Agent:
    """The agent: called once for each rollout, in several threads at once."""

    config: AgentConfig

    def __call__(self, task_input: Mapping[str, Any], endpoint: Endpoint) -> dict[str, Any]:
        """Return the order when it is closed, or when the model says something without a call of a tool."""
        order: dict[str, Any] = {}
        messages: list[Any] = [{"role": "user", "content": task_input["message"]}]
        client = client_of(endpoint.base_url, endpoint.api_key)
        for _ in range(self.config.turns):
            with agentrig.span("assistant"):  # so that the adapter's match finds the call
                reply = client.chat.completions.create(
                    model=endpoint.model,
                    messages=messages,
                    tools=TOOLS,
                    extra_body=dict(endpoint.sampling),
                    extra_headers=dict(endpoint.headers),
                )
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                said = use(order, call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
            if "day" in order or not message.tool_calls:
                break
        return order


def use(order: dict[str, Any], name: str, arguments: str) -> str:
    """Do a call of a tool; return what the model reads. A wrong call is an answer too, not an error."""
    try:
        asked = json.loads(arguments)
        if name == "add" and asked["item"] in ITEMS and asked["count"] in range(1, 10):
            order.update(item=asked["item"], count=asked["count"])
            return "added"
        if name == "deliver" and asked["day"] in DAYS:
            order["day"] = asked["day"]
            return "closed"
    except (ValueError, TypeError, KeyError):
        pass
    return "error: an item and a count to 9, then a day"


def score(task: Task, outcome: Outcome, budget_s: float, trace: Trace) -> Score:
    """Return 1 for the right order, and half of the share that is right for another."""
    gold, order = task.private["gold"], outcome.answer if isinstance(outcome.answer, dict) else {}
    orders, so_far = list[dict[str, Any]](), dict[str, Any]()
    for call in trace.llm_calls():  # with the credit `turn`, each counts by the order so far; else only the end does
        for made in message_of(call.attributes).get("tool_calls") or ():
            use(so_far, made["function"]["name"], made["function"]["arguments"])
        orders.append(dict(so_far))
    *calls, share = [sum(o.get(key) == v for key, v in gold.items()) / len(gold) for o in (*orders, order)]
    return Score.ok(1.0 if share == 1 else share / 2, correct=share == 1, share=share, calls=calls)


SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "tasks": {"use": "order-desk"},
    "agent": {"use": "order-desk"},
    "reward": {"use": "order-desk"},
    "adapter": {"use": "agent-match", "match": "assistant"},
    "algorithm": {
        "use": "grpo",
        "model": "models/order-desk",
        "steps": 12,
        "tasks_per_step": 32,
        "group_size": 4,
        "max_tokens": 72,
        "lr": 1.5e-4,
        "lr_scheduler_type": "linear",
        "warmup_steps": 5,
        "ppo_epochs": 2,
        "mini_batches": 2,
    },
    "credit": {"use": "grpo", "negative_scale": 0.5},
    "runners": {"n": 2, "threads": 16},
}
"""The recipe, as a run file has it. `agentrig warmup order-desk` makes its starting model."""


@hookimpl
def register_tasks() -> Iterable[TasksSpec]:
    """Register the tasks."""
    yield TasksSpec(name="order-desk", summary="Orders of a customer.", config=TasksConfig, build=Tasks)


@hookimpl
def register_agents() -> Iterable[AgentSpec]:
    """Register the agent."""
    yield AgentSpec(name="order-desk", summary="Fills an order with a tool.", config=AgentConfig, build=Agent)


@hookimpl
def register_rewards() -> Iterable[RewardSpec]:
    """Register the reward."""
    yield RewardSpec(name="order-desk", summary="Right lines of an order.", build=lambda config: score, sees_trace=True)


@hookimpl
def register_recipes() -> Iterable[RecipeSpec]:
    """Register the recipe."""
    yield RecipeSpec(name="order-desk", summary="Learns to take orders, on two cores.", settings=SETTINGS)
