"""A toy bandit with a known optimum, as a plugin file: one pull is one answer, and an answer pays 1 or 0.

An answer that begins with a small letter of a to z pays 1, any other 0: the best policy gets 1.0 on every task. A
random model gets about 0.15.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import agentrig
from agentrig import AdapterSpec, AgentSpec, Endpoint, RecipeSpec, RewardSpec, Score, Task, TasksSpec, Triplet, hookimpl
from agentrig.adapters import triplet_of
from agentrig.traces import Trace

NAME = "kit-bandit"
OPTIMUM = 1.0


class BanditTasks:
    """Twenty-four pulls to train with, eight of each other split."""

    splits: Sequence[str] = ("train", "validation", "test")
    roles: Mapping[str, str] = {"train": "train", "validation": "validation", "report": "test"}

    def load(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split."""
        count = 24 if split == "train" else 8
        return [Task(id=f"{split}-{i}", input={"question": f"{split} {i}: pull"}) for i in range(count)]


def pull(task_input: Any, endpoint: Endpoint) -> str:
    """Ask once."""
    import httpx

    body = {"model": endpoint.model, "messages": [{"role": "user", "content": task_input["question"]}]}
    headers = {"Authorization": f"Bearer {endpoint.api_key}", **endpoint.headers}
    with agentrig.span("pull"), httpx.Client(verify=False, trust_env=False, timeout=60) as client:
        url = f"{endpoint.base_url}/chat/completions"
        reply = client.post(url, json={**body, **endpoint.sampling}, headers=headers)
    reply.raise_for_status()
    return str(reply.json()["choices"][0]["message"]["content"] or "")


def pays(task: Task, outcome: Any, budget_s: float) -> Score:
    """Score the first character."""
    first = str(outcome.answer)[:1]
    return Score.ok(OPTIMUM if "a" <= first <= "z" else 0.0)


def every_call(trace: Trace) -> Sequence[Triplet]:
    """Return a triplet for each call."""
    return [t for call in trace.llm_calls() if (t := triplet_of(call, node="pull"))]


register_tasks = hookimpl(lambda: [TasksSpec(name=NAME, summary="Pulls.", build=lambda config: BanditTasks())])
register_agents = hookimpl(lambda: [AgentSpec(name=NAME, summary="Pulls once.", build=lambda config: pull)])
register_rewards = hookimpl(lambda: [RewardSpec(name=NAME, summary="Small letters pay.", build=lambda config: pays)])
register_adapters = hookimpl(lambda: [AdapterSpec(name=NAME, summary="Every call.", build=lambda config: every_call)])


@hookimpl
def register_recipes() -> Iterable[RecipeSpec]:
    """Register the run; one rollout at a time, so that it can be repeated bit for bit."""
    yield RecipeSpec(
        name=NAME,
        summary="The kit's bandit.",
        settings={
            **{kind: {"use": NAME} for kind in ("tasks", "agent", "reward", "adapter")},
            "hardware": {"use": "cpu"},
            "run": {"report_tasks": 8, "validation_tasks": 4, "block": ["report"]},
            "runners": {"n": 1, "threads": 1, "deadline_s": 60.0},
        },
    )
