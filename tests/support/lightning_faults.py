"""Algorithms of Agent Lightning and agents that break, each in one way; unchanged code, one line each to plug in."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import agentlightning as agl
import agentrig_lightning as lightning
import httpx

from agentrig import AdapterSpec, AgentSpec, RewardSpec, Score, hookimpl

# --- algorithms ---


async def enqueue(self, rows, mode="train", resources_id=None):
    store = self.get_store()
    if resources_id is None:
        resources_id = (await store.add_resources(self.get_initial_resources())).resources_id
    return [(await store.enqueue_rollout(input=r, mode=mode, resources_id=resources_id)).rollout_id for r in rows]


class Waits(agl.Algorithm):
    """Rolls out all tasks once, and waits for all of them, however long it takes."""

    async def run(self, train_dataset=None, val_dataset=None):
        await self.get_store().wait_for_rollouts(rollout_ids=await enqueue(self, train_dataset), timeout=None)


class Learns(agl.Algorithm):
    async def run(self, train_dataset=None, val_dataset=None):
        ids = await enqueue(self, train_dataset)
        await self.get_store().wait_for_rollouts(rollout_ids=ids, timeout=None)
        for rollout_id in ids:
            self.get_adapter().adapt(await self.get_store().query_spans(rollout_id))


class Deaf(agl.Algorithm):
    async def run(self, train_dataset=None, val_dataset=None):
        await enqueue(self, train_dataset)
        while True:
            await asyncio.sleep(0.1)


class Raises(Waits):
    async def run(self, train_dataset=None, val_dataset=None):
        await super().run(train_dataset, val_dataset)
        raise KeyError("no such prompt")


class BreaksStore(agl.Algorithm):
    """Takes the store's content away, and waits for a rollout."""

    async def run(self, train_dataset=None, val_dataset=None):
        ids = await enqueue(self, train_dataset)
        del self.get_store().collections.rollout_queue._items
        await self.get_store().wait_for_rollouts(rollout_ids=ids, timeout=None)


class Texts(agl.Algorithm):
    async def run(self, train_dataset=None, val_dataset=None):
        ids = await enqueue(self, ["Is 3 odd?", "Is 4 odd?", ["a", "list"]])
        done = await self.get_store().wait_for_rollouts(rollout_ids=ids, timeout=20)
        assert [r.status for r in done] == ["succeeded"] * 3


class Modes(agl.Algorithm):
    """Two versions of the resources, with training and validation rollouts each; failed attempts run again."""

    async def run(self, train_dataset=None, val_dataset=None):
        store = self.get_store()
        for _ in range(2):
            first = (await store.add_resources(self.get_initial_resources())).resources_id
            ids = await enqueue(self, train_dataset[:4], "train", first)
            ids += await enqueue(self, val_dataset[:2], "val", first)
            await store.wait_for_rollouts(rollout_ids=ids, timeout=20)
        again = agl.RolloutConfig(max_attempts=2, retry_condition=["failed"])
        last = await store.enqueue_rollout(
            input={"number": 1, "do": "raise-once"}, mode="train", resources_id=first, config=again
        )
        (done,) = await store.wait_for_rollouts(rollout_ids=[last.rollout_id], timeout=20)
        assert (done.status, len(await store.query_attempts(done.rollout_id))) == ("succeeded", 2)


# --- agents, a reward, an adapter ---


def ask(endpoint, content):
    body = {"model": endpoint.model, "messages": [{"role": "user", "content": content}], **endpoint.sampling}
    reply = httpx.post(f"{endpoint.base_url}/chat/completions", json=body, timeout=20)
    return reply.json()["choices"][0]["message"]["content"]


def plain(task_input, endpoint):
    return ask(endpoint, str(task_input))


def counts(task_input, endpoint):
    """Raise on the first attempt at a task that asks for it."""
    mark = Path(os.environ["TMPDIR"]) / "raised"
    if task_input.get("do") == "raise-once" and not mark.exists():
        mark.touch()
        raise ValueError("the first attempt fails")
    return ask(endpoint, f"Is {task_input['number']} odd?")


def raises(task_input, endpoint):
    raise ValueError("this agent cannot count")


def build_once(config):
    """Build in the first runner only; its rollouts kill it."""
    mark = Path(os.environ["TMPDIR"]) / "built"
    if mark.exists():
        os.kill(os.getpid(), signal.SIGKILL)  # `os._exit` raises there
    mark.touch()

    def dies(task_input, endpoint):
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)

    return dies


def broken_adapter(trace):
    raise LookupError("no template for this model")


@hookimpl
def register_agents():
    yield AgentSpec(name="plain", summary="Asks.", build=lambda config: plain)
    yield AgentSpec(name="counts", summary="Asks.", build=lambda config: counts, environment=["TMPDIR"])
    yield AgentSpec(name="raises", summary="Fails.", build=lambda config: raises)
    yield AgentSpec(name="builds-once", summary="Dies.", build=build_once, environment=["TMPDIR"])


@hookimpl
def register_rewards():
    yield RewardSpec(name="always", summary="1.", build=lambda config: lambda task, outcome, budget_s: Score.ok(1.0))


@hookimpl
def register_adapters():
    yield AdapterSpec(name="broken", summary="Raises.", build=lambda config: broken_adapter)


@hookimpl
def register_algorithms():
    for cls in (Waits, Learns, Deaf, Raises, BreaksStore, Texts, Modes):
        yield lightning.algorithm(cls, name=f"alg-{cls.__name__.lower()}", summary="An algorithm.")
