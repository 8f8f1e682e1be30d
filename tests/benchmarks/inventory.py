"""A domain written from the docs alone: questions about a stock of goods, answered with three tools.

    agentrig warmup inventory --plugin tests/benchmarks/inventory.py

`find` gives the number of an article, `stock` and `price` want that number, and the answer is what they say. The reward
gives something for each right call. `tools.py` trains it; `tools.md` has the figures.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import agentrig
from agentrig import AgentSpec, RecipeSpec, RewardSpec, Score, Task, TasksSpec, hookimpl
from agentrig.demonstrations import Reply

COLORS = ("red", "blue", "green", "black", "white", "grey", "yellow", "brown", "purple", "orange")
GOODS = (
    "kettle",
    "lamp",
    "chair",
    "towel",
    "bucket",
    "ladder",
    "mirror",
    "blanket",
    "basket",
    "stool",
    "vase",
    "clock",
)
STORES = ("north", "south", "harbour", "station", "airport")
SIZES = {"train": 900, "validation": 64, "test": 300}

WORDINGS = {
    "count": (
        "how many {item}s are left in the {store} store?",
        "{store} store: how many {item}s do we have?",
        "I need the number of {item}s at {store}",
        "does {store} still have {item}s, and how many?",
    ),
    "shelf": (
        "where do the {item}s lie in the {store} store?",
        "on which shelf at {store} is the {item}?",
        "{store} store: shelf of the {item}?",
        "I am at {store} and can't find the {item}, which shelf?",
    ),
    "price": (
        "what does a {item} cost?",
        "price of the {item}?",
        "how much is one {item}, please?",
        "a customer asks what we want for the {item}",
    ),
    "both": (
        "how many {item}s are at {store}, and what does one cost?",
        "{store} store: number of {item}s and their price?",
        "I want to sell the {item}s of {store}: how many, at what price?",
        "count the {item}s in {store} and tell me the price",
    ),
}


def article(i: int) -> dict[str, Any]:
    """Return the article of a number: the same in every run."""
    rng = random.Random(f"article {i}")
    places = {
        store: {"count": rng.randint(2, 98), "shelf": f"{rng.choice('ABCDEFGH')}{rng.randint(10, 99)}"}
        for store in STORES
    }
    return {"sku": f"{rng.choice('KLMNPRST')}{rng.randint(1000, 9999)}", "price": rng.randint(3, 240), "places": places}


STOCK = {f"{color} {good}": article(i) for i, (color, good) in enumerate((c, g) for c in COLORS for g in GOODS)}
BY_SKU = {found["sku"]: found for found in STOCK.values()}


class Questions:
    """The task set. No question of one split is in another, not even in other words."""

    splits = tuple(SIZES)
    roles = {"train": "train", "validation": "validation", "report": "test"}  # noqa: RUF012

    def load(self, split: str) -> list[Task]:
        rng = random.Random("inventory")
        facts = [(item, kind, store) for item in STOCK for kind in WORDINGS for store in STORES]
        rng.shuffle(facts)
        prices: set[str] = set()  # a price is asked once for each item: it is the same in all stores
        tasks: list[Task] = []
        for name, size in SIZES.items():
            tasks = []
            while len(tasks) < size:
                item, kind, store = facts.pop()
                if kind == "price" and item in prices:
                    continue
                prices |= {item} if kind == "price" else set()
                text = rng.choice(WORDINGS[kind]).format(item=item, store=store)
                tasks.append(task_of(f"{name}-{len(tasks):04}", text, item, kind, store))
            if name == split:
                break
        return tasks

    def demonstrate(self, task: Task, call: Any) -> Reply | str:
        """Return the right reply: the next call, or the answer."""
        calls = task.private["calls"]
        return Reply(tool_calls=[calls[call.turn]]) if call.turn < len(calls) else str(task.private["gold"])


def task_of(name: str, text: str, item: str, kind: str, store: str) -> Task:
    """Return a task: the question, and for the reward the right calls and the right answer."""
    found = STOCK[item]
    calls = [{"name": "find", "arguments": {"article": item}}]
    if kind != "price":
        calls.append({"name": "stock", "arguments": {"sku": found["sku"], "store": store}})
    if kind in ("price", "both"):
        calls.append({"name": "price", "arguments": {"sku": found["sku"]}})
    place = found["places"][store]
    gold = {
        "count": f"{place['count']}",
        "shelf": f"{place['shelf']}",
        "price": f"{found['price']} euros",
        "both": f"{place['count']} at {found['price']} euros",
    }[kind]
    return Task(id=name, input={"question": text}, private={"gold": gold, "calls": calls})


def tool(name: str, description: str, *arguments: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {key: {"type": "string"} for key in arguments}}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = (
    tool("find", "Find the sku of an article.", "article"),
    tool("stock", "Count and shelf of a sku in a store.", "sku", "store"),
    tool("price", "Price of a sku.", "sku"),
)


def use(name: str, arguments: str) -> str:
    """Do a call; a wrong one is an answer that the model reads."""
    try:
        asked = json.loads(arguments)
        if name == "find":
            return json.dumps({"sku": STOCK[asked["article"]]["sku"]})
        if name == "stock":
            return json.dumps(BY_SKU[asked["sku"]]["places"][asked["store"]])
        if name == "price":
            return json.dumps({"price": BY_SKU[asked["sku"]]["price"]})
    except (ValueError, TypeError, KeyError):
        pass
    return "error: not found"


@lru_cache(maxsize=8)
def client_of(base_url: str, api_key: str) -> Any:
    """Return a client for a server; kept, because making one takes longer than a call."""
    from openai import OpenAI

    return OpenAI(base_url=base_url, api_key=api_key)


def clerk(task_input: Mapping[str, Any], endpoint: Any) -> dict[str, Any]:
    """Answer a question: the calls that were made, and what was said at the end."""
    messages: list[Any] = [{"role": "user", "content": task_input["question"]}]
    client, calls = client_of(endpoint.base_url, endpoint.api_key), []
    for _ in range(5):
        with agentrig.span("clerk"):
            reply = client.chat.completions.create(
                model=endpoint.model,
                messages=messages,
                tools=TOOLS,
                extra_body=dict(endpoint.sampling),
                extra_headers=dict(endpoint.headers),
            )
        message = reply.choices[0].message
        if not message.tool_calls:
            return {"calls": calls, "said": message.content or ""}
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            calls.append([call.function.name, call.function.arguments])
            said = use(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
    return {"calls": calls, "said": ""}


def score(task: Task, outcome: Any, budget_s: float) -> Score:
    """Give 1 for the right answer, and otherwise up to 0.4 for the share of the right calls that were made."""
    answer = outcome.answer if isinstance(outcome.answer, dict) else {"said": outcome.answer}
    made = [(name, _read(arguments)) for name, arguments in answer.get("calls", ())]
    wanted: Sequence[Any] = task.private["calls"]
    share = sum((call["name"], call["arguments"]) in made for call in wanted) / len(wanted)
    right = str(answer.get("said")).strip() == task.private["gold"]
    return Score.ok(1.0 if right else 0.4 * share, correct=right, calls=share)


def _read(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return None


@hookimpl
def register_tasks() -> Any:
    yield TasksSpec(name="inventory", summary="Questions about a stock.", build=lambda config: Questions())


@hookimpl
def register_agents() -> Any:
    yield AgentSpec(name="clerk", summary="Asks three tools.", build=lambda config: clerk, preload=("openai",))


@hookimpl
def register_rewards() -> Any:
    yield RewardSpec(name="inventory", summary="Right calls, and the answer.", build=lambda config: score)


@hookimpl
def register_recipes() -> Any:
    yield RecipeSpec(
        name="inventory",
        summary="Learns to answer questions about a stock, on two cores.",
        settings={
            "tasks": {"use": "inventory"},
            "agent": {"use": "clerk"},
            "reward": {"use": "inventory"},
            "adapter": {"use": "agent-match", "match": "clerk"},
            "algorithm": {
                "use": "grpo",
                "steps": 16,
                "tasks_per_step": 24,
                "group_size": 4,
                "max_tokens": 56,
                "lr": 1.5e-4,
                "lr_scheduler_type": "linear",
                "warmup_steps": 5,
                "ppo_epochs": 2,
                "mini_batches": 2,
                "validate_every": 0,
            },
            "credit": {"use": "grpo", "negative_scale": 0.5},
            "runners": {"n": 2, "threads": 16},
        },
    )
