"""Plugin file of `soak.py`: tasks, an agent that misbehaves, and a reward that fails, by chance and on request.

`SOAK` is JSON: `{"seed": N, "wishes": FOLDER, "other": URL}`. A file in FOLDER named after a fault makes the next
rollout commit it, and is gone then. URL is a server that answers any chat at once.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
import zlib
from pathlib import Path

import httpx

import agentrig
from agentrig import AgentFailure, AgentSpec, RewardSpec, Score, Task, TasksSpec, hookimpl

GIVEN = json.loads(os.environ.get("SOAK", '{"seed": 0, "wishes": ".", "other": "http://127.0.0.1:9/v1"}'))
RARE = ("hang", "die", "trained-cold")
"""Faults that cost a deadline, a process or the run: they are wished for, one at a time."""
OFTEN = {
    "raise": 0.02, "typed": 0.02, "slow": 0.02, "silent": 0.01, "garbage": 0.02, "surrogate": 0.01, "large": 0.005,
    "other-server": 0.02, "untrained-cold": 0.02, "reuse": 0.02, "twice": 0.02, "broken-call": 0.01, "thread": 0.01,
}  # fmt: skip
"""Share of the rollouts that commit each fault."""

client = httpx.Client(timeout=30)
earlier = ["nothing yet"]
chance = random.Random(f"{GIVEN['seed']} {os.getpid()}")


class Words:
    splits = ("train", "test")
    roles = {"train": "train", "report": "test"}  # noqa: RUF012

    def load(self, split):
        return [Task(id=f"{split}-{i}", input={"text": f"word {i} " * (1 + i % 4)}) for i in range(64)]


def ask(endpoint, text, node="speak"):
    """Make one call to the model under a node."""
    body = {"model": endpoint.model, "messages": [{"role": "user", "content": text}], **endpoint.sampling}
    headers = {"Authorization": f"Bearer {endpoint.api_key}", **endpoint.headers}
    with agentrig.span(node):
        reply = client.post(f"{endpoint.base_url}/chat/completions", json=body, headers=headers)
        reply.raise_for_status()
    return reply.json()["choices"][0]["message"]["content"]


def wished():
    """Return a rare fault that somebody wishes for, or ''; only one rollout gets it."""
    for name in RARE:
        try:
            (Path(GIVEN["wishes"]) / name).unlink()
        except OSError:
            continue
        return name
    return ""


def often():
    """Return a fault by chance, or ''."""
    draw = chance.random()
    for name, share in OFTEN.items():
        draw -= share
        if draw < 0:
            return name
    return ""


def agent(given, endpoint):
    """Answer by one call, or misbehave."""
    text, fault = given["text"], wished() or often()
    if fault == "hang":
        time.sleep(600)
    if fault == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "raise":
        raise ValueError("this agent cannot count")
    if fault == "typed":
        raise AgentFailure("there is no plan", kind="no-plan")
    if fault == "slow":
        time.sleep(0.3)
    if fault == "reuse":
        return earlier[-1]
    if fault == "silent":
        return "no call was made"
    if fault == "trained-cold":
        return ask(endpoint.with_sampling(temperature=0.1), text)
    if fault == "untrained-cold":
        ask(endpoint.with_sampling(temperature=0.1), text, node="think")
    if fault == "other-server":
        body = {"model": "other", "messages": [{"role": "user", "content": text}]}
        with agentrig.span("speak"):
            client.post(f"{GIVEN['other']}/chat/completions", json=body).raise_for_status()
    if fault == "broken-call":
        ask(endpoint, None)
    if fault == "twice":
        ask(endpoint, text)
    if fault == "thread":
        threading.Thread(target=time.sleep, args=(1.0,), daemon=True).start()
    answer = ask(endpoint, text)
    earlier[-1] = answer
    odd = {"garbage": {"rows": [[1, None], {"x": 2.5}]}, "surrogate": "half \ud800", "large": "x" * 200_000}
    return odd.get(fault, answer)


def reward(task, outcome, budget_s):
    """Return a number that differs from answer to answer; sometimes raise, or judge nothing."""
    draw = chance.random()
    if draw < 0.01:
        raise OSError("the database is away")
    if draw < 0.02:
        return Score.invalid("nobody can tell")
    if draw < 0.03:
        return Score.timeout("its query took too long")
    return Score.ok(zlib.crc32(repr(outcome.answer)[:2000].encode("utf-8", "replace")) % 1000 / 1000)


@hookimpl
def register_tasks():
    yield TasksSpec(name="soak-words", summary="Short texts.", build=lambda config: Words())


@hookimpl
def register_agents():
    yield AgentSpec(name="soak-agent", summary="Misbehaves.", environment=("SOAK",), build=lambda config: agent)


@hookimpl
def register_rewards():
    yield RewardSpec(name="soak-sums", summary="Fails now and then.", build=lambda config: reward)
