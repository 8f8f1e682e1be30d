"""Unchanged code for Agent Lightning 0.3, and the one line that each class needs here.

Only the functions `register_*` use agentrig.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import socket
from pathlib import Path

import agentlightning as agl
import agentrig_lightning as lightning
from agentlightning import AgentOpsTracer, LitAgent, OtelTracer, TracerTraceToTriplet, TraceToMessages
from openai import AsyncOpenAI, OpenAI

from agentrig import hookimpl


class Parity(LitAgent):
    """Returns its own reward."""

    def rollout(self, task, resources, rollout):
        llm = resources["main_llm"]
        with OpenAI(base_url=llm.endpoint, api_key=llm.api_key or "none") as client:
            reply = client.chat.completions.create(
                model=llm.model,
                messages=[{"role": "user", "content": f"Is {task['number']} odd?"}],
                **llm.sampling_parameters,
            )
        answer = reply.choices[0].message.content
        return 1.0 if answer == ("odd" if task["number"] % 2 else "even") else 0.0


class AsyncParity(LitAgent):
    """Asynchronous, with one client for all rollouts."""

    client = None

    async def rollout_async(self, task, resources, rollout):
        llm = resources["main_llm"]
        if self.client is None:
            self.client = AsyncOpenAI(base_url=llm.endpoint, api_key="none")
        reply = await self.client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": f"[sleep=0.05] Is {task['number']} odd?"}]
        )
        return float((reply.choices[0].message.content == "odd") == (task["number"] % 2 == 1))


class Emitting(Parity):
    """Emits its reward and returns nothing, as agents do whose tracer records it."""

    def rollout(self, task, resources, rollout):
        value = super().rollout(task, resources, rollout)
        assert rollout.rollout_id
        agl.emit_reward(value)


class Failing(LitAgent):
    """Tries the network, to show that the tests would find it; then raises."""

    def rollout(self, task, resources, rollout):
        with contextlib.suppress(OSError):
            socket.create_connection(("192.0.2.1", 9), timeout=0.1)
        raise KeyError("no such column")


class Sweep(agl.Algorithm):
    """Rolls out all tasks once, waits, and reads spans and triplets from the store."""

    async def run(self, train_dataset=None, val_dataset=None):
        store, adapter = self.get_store(), self.get_adapter()
        resources = await store.add_resources(self.get_initial_resources())
        rollouts = [
            await store.enqueue_rollout(input=row, mode="train", resources_id=resources.resources_id)
            for row in train_dataset
        ]
        ids = [r.rollout_id for r in rollouts]
        done = await store.wait_for_rollouts(rollout_ids=ids, timeout=60)
        found = []
        for rollout in done:
            spans = await store.query_spans(rollout.rollout_id)
            triplets = adapter.adapt(spans)
            found.append(
                {
                    "number": rollout.input["number"],
                    "status": rollout.status,
                    "names": [s.name for s in spans],
                    "reward": agl.find_final_reward(spans),
                    "triplets": [
                        {"prompt": t.prompt["token_ids"], "response": t.response["token_ids"], "reward": t.reward}
                        for t in triplets
                    ],
                }
            )
        assert len(val_dataset) > 0
        Path(os.environ["SWEEP_FILE"]).write_text(json.dumps(found))


class Waiting(agl.Algorithm):
    """A synchronous algorithm, which reads messages: its script names another adapter."""

    def run(self, train_dataset=None, val_dataset=None):
        store = self.get_store()
        row = train_dataset[0]
        resources = asyncio.run(store.add_resources(self.get_initial_resources()))
        rollout = asyncio.run(store.enqueue_rollout(input=row, mode="train", resources_id=resources.resources_id))
        (done,) = asyncio.run(store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=60))
        assert done.status == "succeeded"
        spans = asyncio.run(store.query_spans(rollout.rollout_id))
        Path(os.environ["SWEEP_FILE"]).write_text(json.dumps(self.get_adapter().adapt(spans)))


@agl.rollout
async def prompted(task, prompt_template, rollout):
    """Likes prompts that end with a question mark, and looks in the right place for its mode."""
    prompt = prompt_template.format(number=task["number"])
    place = {"train": 0.5, "val": 0.25}[rollout.mode]
    return place * prompt.endswith("?") * (rollout.attempt.sequence_id == 1)


async def best_prompt(*, store, templates, task, initial_resources):
    """Tries templates one after the other, as the first algorithm of Agent Lightning's tutorial."""
    found = []
    for mode in ("train", "val"):
        for template in templates:
            prompt = agl.PromptTemplate(template=template, engine="f-string")
            update = await store.add_resources({"prompt": prompt, **initial_resources})
            rollout = await store.enqueue_rollout(input=task, mode=mode, resources_id=update.resources_id)
            (done,) = await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=60)
            reward = agl.find_final_reward(await store.query_spans(rollout.rollout_id))
            found.append([mode, template, reward, done.status, sorted(initial_resources)])
    Path(os.environ["SWEEP_FILE"]).write_text(json.dumps(found))


first_algorithm = functools.partial(best_prompt, templates=["{number}", "Is {number} odd?"], task={"number": 7})


@hookimpl
def register_agents():
    yield lightning.agent(prompted, name="lit-prompted", summary="Gets a prompt template.")
    yield lightning.agent(Parity, name="lit", summary="Returns a number.")
    yield lightning.agent(AsyncParity, name="lit-async", summary="Asynchronous.")
    yield lightning.agent(Emitting, name="lit-emits", summary="Emits its reward.")
    yield lightning.agent(Failing, name="lit-fails", summary="Raises.")
    yield lightning.agent(Emitting, tracer=OtelTracer, name="lit-otel", summary="Traced by OpenTelemetry.")
    yield lightning.agent(Emitting, tracer=AgentOpsTracer, name="lit-agentops", summary="Traced by AgentOps.")
    yield lightning.agent(AsyncParity, tracer=AgentOpsTracer, name="lit-agentops-async", summary="Traced by AgentOps.")


@hookimpl
def register_adapters():
    yield lightning.adapter(
        lambda: TracerTraceToTriplet(agent_match="write"), name="lit-triplets", summary="Their adapter."
    )
    yield lightning.adapter(TracerTraceToTriplet, name="lit-all", summary="Their adapter.")


@hookimpl
def register_algorithms():
    yield lightning.algorithm(
        first_algorithm,
        name="lit-first",
        summary="A function that takes the store only.",
        initial_resources={"main_llm": agl.PromptTemplate(template="mine", engine="f-string")},
        resource="main_llm",
    )
    yield lightning.algorithm(Sweep, name="lit-sweep", summary="Rolls out once.")
    yield lightning.algorithm(
        Waiting, name="lit-waiting", summary="Rolls out once, synchronously.", adapter=TraceToMessages
    )
