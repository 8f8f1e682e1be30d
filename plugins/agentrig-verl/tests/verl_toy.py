"""A plugin file for the tests: agents with one or two conversations, and random answers."""

from __future__ import annotations

import os
import random

import httpx

import agentrig
from agentrig import AgentSpec, hookimpl


def ask(endpoint, messages):
    body = {"model": endpoint.model, "messages": messages, **endpoint.sampling}
    reply = httpx.post(f"{endpoint.base_url}/chat/completions", json=body, headers=dict(endpoint.headers), timeout=30)
    reply.raise_for_status()
    return {"role": "assistant", "content": reply.json()["choices"][0]["message"]["content"]}


def talker(task_input, endpoint):
    """Have two parallel conversations of one to three turns, and answer odd or even at random."""
    from toy_plugin import misbehave

    misbehave(task_input.get("do", ""), task_input)
    chance = random.Random(os.urandom(8))
    talks = {name: [] for name in ("a", "b")}
    for turn in range(chance.randint(1, 3)):
        for name, talk in talks.items():
            with agentrig.span("write_query"):
                talk.append({"role": "user", "content": f"{name}{turn}: is {task_input['number']} odd? "})
                talk.append(ask(endpoint, list(talk)))
    return chance.choice(["odd", "even"])


def variables(task_input, endpoint):
    return dict(os.environ)


@hookimpl
def register_agents():
    yield AgentSpec(name="toy-talker", summary="Talks.", build=lambda config: talker)
    yield AgentSpec(name="toy-variables", summary="Names them.", build=lambda config: variables)
