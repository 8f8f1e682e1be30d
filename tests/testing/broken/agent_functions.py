"""Agents that lack one property each; `fine` has all."""

from __future__ import annotations

import fcntl
import json
import os
import re
import tempfile
import time
import urllib.request
import zlib

import httpx

from agentrig import AgentSpec, Endpoint, Task, TasksSpec, hookimpl

GOLD = {f"w{i}": f"gold-{i}-{i * 7}" for i in range(8)}


class Words:
    """Words whose private part is a code."""

    splits = ("train",)
    roles = {"train": "train"}  # noqa: RUF012

    def load(self, split):
        return [Task(id=word, input={"word": word}, private={"gold": gold}) for word, gold in GOLD.items()]


def ask(endpoint: Endpoint, content, *, timeout=20, **changes):
    body = {"model": endpoint.model, "messages": [{"role": "user", "content": content}], **endpoint.sampling}
    headers = {"Authorization": f"Bearer {endpoint.api_key}", **endpoint.headers}
    body |= changes.pop("body", {})
    url = changes.pop("url", endpoint.base_url)
    reply = httpx.post(f"{url}/chat/completions", json=body, headers=headers, timeout=timeout)
    reply.raise_for_status()
    return reply.json()["choices"][0]["message"]["content"] or ""


def fine(task_input, endpoint):
    first = ask(endpoint, f"Say {task_input['word']}")
    return ask(endpoint, f"Say {task_input['word']} after {first[:100]}")


def raises(task_input, endpoint):
    ask(endpoint, task_input["word"])
    return task_input["wrd"]


def forgets(task_input, endpoint):
    ask(endpoint, task_input["word"])


def reads_a_form(task_input, endpoint):
    """Return what the model says in a form, and None without it: no fault."""
    found = re.search("### (.*) ###", ask(endpoint, task_input["word"]))
    return found[1] if found else None


def by_urllib(task_input, endpoint):
    body = {"model": endpoint.model, "messages": [{"role": "user", "content": "x"}], **endpoint.sampling}
    headers = {"Authorization": f"Bearer {endpoint.api_key}", "content-type": "application/json", **endpoint.headers}
    request = urllib.request.Request(f"{endpoint.base_url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]["content"] or ""


class Shared:
    """Keeps the task of a rollout where another thread changes it."""

    def __call__(self, task_input, endpoint):
        self.word = task_input["word"]
        ask(endpoint, "wait")
        time.sleep(0.02)
        return ask(endpoint, f"Say {self.word}")


class Late:
    """Answers with the reply of the rollout before."""

    last = ""

    def __call__(self, task_input, endpoint):
        before, self.last = self.last, ask(endpoint, task_input["word"])
        return before or self.last


class Locked:
    """Works in one process at a time."""

    def __init__(self):
        self.file = open(os.path.join(tempfile.gettempdir(), f"agentrig-kit-{zlib.crc32(__file__.encode())}.lock"), "w")  # noqa: SIM115
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


BROKEN = {
    "calls-endpoint": lambda given, endpoint: ask(endpoint, given["word"], url="http://127.0.0.1:9/v1"),
    "calls-endpoint-raises": lambda given, endpoint: ask(endpoint, given["wrd"]),
    "answers": raises,
    "answers-json": lambda given, endpoint: {fine(given, endpoint)} if ask(endpoint, "x") == "ok" else "",
    "answers-no-return": forgets,
    "recorded": by_urllib,
    "sampling": lambda given, endpoint: ask(endpoint, given["word"], body={"temperature": 0.0}),
    "sampling-model": lambda given, endpoint: ask(endpoint, given["word"], body={"model": "gpt-5"}),
    "private": lambda given, endpoint: ask(endpoint, f"Say {GOLD[given['word']]}"),
    "private-asked": lambda given, endpoint: ask(endpoint, given["word"]) + str(given.get("gold")),
    "same-twice": lambda given, endpoint: ask(endpoint, f"It is {time.time_ns()}: {given['word']}"),
    "together": Shared(),
    "together-last-reply": Late(),
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
    yield AgentSpec(name="form", summary="Fine.", build=lambda config: reads_a_form)
    yield AgentSpec(name="starts", summary="Broken.", build=lambda config: os._exit(3))
    yield AgentSpec(name="together-processes", summary="Broken.", build=lambda config: Locked())
    for name, agent in BROKEN.items():
        yield AgentSpec(name=name, summary="Broken.", build=lambda config, agent=agent: agent)
