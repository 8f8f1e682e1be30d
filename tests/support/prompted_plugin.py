"""A small domain whose accuracy depends on the prompt in a known way.

Each kind of task needs one rule in the prompt. The scripted model answers a kind right if the prompt names its rule, as
a model would that reads the prompt.
"""

from __future__ import annotations

import httpx

import agentrig
from agentrig import AgentSpec, RewardSpec, Score, Task, TasksSpec, hookimpl

RULES = {"sum": "ADD", "product": "MULTIPLY", "difference": "SUBTRACT", "largest": "MAXIMUM"}
PROMPTS = {"system": "Answer {question} with a number."}
SIZES = {"train": 24, "validation": 12, "test": 40}


def right(kind: str, a: int, b: int) -> str:
    return str({"sum": a + b, "product": a * b, "difference": a - b, "largest": max(a, b)}[kind])


def task(split: str, number: int) -> Task:
    kind = list(RULES)[number % len(RULES)]
    a, b = 20 + 3 * number % 17, 1 + 5 * number % 13
    given = {"question": f"{kind} of {a} and {b}"}
    return Task(id=f"{split}-{number}", input=given, private={"right": right(kind, a, b)})


class Sums:
    splits = tuple(SIZES)
    roles = {"train": "train", "validation": "validation", "report": "test"}  # noqa: RUF012

    def load(self, split):
        return [task(split, 100 * list(SIZES).index(split) + i) for i in range(SIZES[split])]


def agent(task_input, endpoint):
    prompt = agentrig.prompts(PROMPTS)["system"].format(question=task_input["question"])
    body = {"model": endpoint.model, "messages": [{"role": "user", "content": prompt}]}
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    with httpx.Client(verify=False) as client:  # what is trusted takes long to load
        reply = client.post(f"{endpoint.base_url}/chat/completions", json=body, headers=headers, timeout=20)
    reply.raise_for_status()
    return reply.json()["choices"][0]["message"]["content"]


def reward(task, outcome, budget_s):
    """Compare with the right number; the feedback names the rule that the answer needed."""
    good = outcome.answer == task.private["right"]
    kind = task.input["question"].split()[0]
    return Score.ok(float(good), feedback="right" if good else f"wrong: the rule for {kind} is {RULES[kind]}")


@hookimpl
def register_tasks():
    yield TasksSpec(name="sums", summary="Tasks of four kinds.", build=lambda config: Sums())


@hookimpl
def register_agents():
    yield AgentSpec(name="prompted", summary="Asks with its prompt.", build=lambda config: agent, prompts=PROMPTS)
    yield AgentSpec(name="unprompted", summary="Has no prompt.", build=lambda config: agent)


@hookimpl
def register_rewards():
    yield RewardSpec(name="exact", summary="The right number.", build=lambda config: reward)
