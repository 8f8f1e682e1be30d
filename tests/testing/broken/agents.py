"""Agents that lack one property each; `fine` has all."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import time
import urllib.request

import httpx

from agentrig import AgentSpec, Endpoint, Task, TasksSpec, hookimpl

GOLD = {f"w{i}": f"gold-{i}-{i * 7}" for i in range(8)}
STARTED = time.time_ns()


class Words:
    """Words whose private part is a code."""

    splits = ("train",)
    roles = {"train": "train"}  # noqa: RUF012

    def load(self, split):
        """Return the tasks."""
        return [Task(id=word, input={"word": word}, private={"gold": gold}) for word, gold in GOLD.items()]


def ask(endpoint: Endpoint, content, *, timeout=20, **changes):
    """Ask the model, by plain httpx."""
    body = {"model": endpoint.model, "messages": [{"role": "user", "content": content}], **endpoint.sampling}
    headers = {"Authorization": f"Bearer {endpoint.api_key}", **endpoint.headers}
    body |= changes.pop("body", {})
    url = changes.pop("url", endpoint.base_url)
    reply = httpx.post(f"{url}/chat/completions", json=body, headers=headers, timeout=timeout)
    reply.raise_for_status()
    return reply.json()["choices"][0]["message"]["content"] or ""


def fine(task_input, endpoint):
    """Ask, and ask again."""
    first = ask(endpoint, f"Say {task_input['word']}")
    return ask(endpoint, f"Say {task_input['word']} after {first[:100]}")


def of_another_server(task_input, endpoint):
    return ask(endpoint, task_input["word"], url="http://127.0.0.1:9/v1")


def raises(task_input, endpoint):
    ask(endpoint, task_input["word"])
    return task_input["wrd"]


def gives_a_set(task_input, endpoint):
    return {fine(task_input, endpoint)} if ask(endpoint, "x") == "ok" else ""


def by_urllib(task_input, endpoint):
    body = {"model": endpoint.model, "messages": [{"role": "user", "content": "x"}], **endpoint.sampling}
    headers = {"Authorization": f"Bearer {endpoint.api_key}", "content-type": "application/json", **endpoint.headers}
    request = urllib.request.Request(f"{endpoint.base_url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]["content"] or ""


def cold(task_input, endpoint):
    return ask(endpoint, task_input["word"], body={"temperature": 0.0})


def own_model(task_input, endpoint):
    return ask(endpoint, task_input["word"], body={"model": "gpt-5"})


def cheats(task_input, endpoint):
    return ask(endpoint, f"Say {GOLD[task_input['word']]}")


def asks_for_gold(task_input, endpoint):
    return ask(endpoint, task_input["word"]) + str(task_input.get("gold"))


def dated(task_input, endpoint):
    return ask(endpoint, f"It is {time.time_ns()}: {task_input['word']}")


class Shared:
    """Keeps the task of a rollout where another thread changes it."""

    def __call__(self, task_input, endpoint):
        """Answer."""
        self.word = task_input["word"]
        ask(endpoint, "wait")
        time.sleep(0.02)
        return ask(endpoint, f"Say {self.word}")


class Locked:
    """Works in one process at a time."""

    def __init__(self):
        self.file = open(os.path.join(tempfile.gettempdir(), f"agentrig-kit-{os.getppid()}.lock"), "w")  # noqa: SIM115
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.mine = True
        except OSError:
            self.mine = False

    def __call__(self, task_input, endpoint):
        """Answer, in the first process."""
        if not self.mine:
            time.sleep(0.05)
            raise OSError("another process has the lock")
        time.sleep(0.05)
        return fine(task_input, endpoint)


def makes_up(task_input, endpoint):
    try:
        return fine(task_input, endpoint)
    except httpx.HTTPStatusError:
        return ""


def parses(task_input, endpoint):
    reply = ask(endpoint, f"Say {task_input['word']}")
    return json.loads(reply) if reply.startswith("{") else reply


def insists(task_input, endpoint):
    while "lorem" in ask(endpoint, f"Say {task_input['word']}"):
        time.sleep(0.02)
    return "done"


def impatient(task_input, endpoint):
    try:
        return ask(endpoint, f"Say {task_input['word']}", timeout=0.35)
    except httpx.TimeoutException:
        return "sorry"


def dies(config):
    os._exit(3)


BROKEN = {
    "calls-endpoint": of_another_server,
    "answers": raises,
    "json-answer": gives_a_set,
    "recorded": by_urllib,
    "sampling": cold,
    "model": own_model,
    "private": cheats,
    "same-twice": dated,
    "threads": Shared(),
    "server-error": makes_up,
    "odd-replies": parses,
    "deadline": insists,
    "slow-server": impatient,
}
"""By the check that catches it."""


@hookimpl
def register_tasks():
    yield TasksSpec(name="words", summary="Words.", build=lambda config: Words())


@hookimpl
def register_agents():
    yield AgentSpec(name="fine", summary="Fine.", build=lambda config: fine)
    yield AgentSpec(name="starts", summary="Broken.", build=dies)
    yield AgentSpec(name="processes", summary="Broken.", build=lambda config: Locked())
    yield AgentSpec(name="asks-for-gold", summary="Broken.", build=lambda config: asks_for_gold)
    for name, agent in BROKEN.items():
        yield AgentSpec(name=name, summary="Broken.", build=lambda config, agent=agent: agent)
