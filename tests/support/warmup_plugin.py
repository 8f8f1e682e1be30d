"""Tasks and agents for the tests of the warm-up: say a color twice; the second call shows the first reply."""

from __future__ import annotations

import attrs
import httpx

from agentrig import AgentSpec, RecipeSpec, RewardSpec, Score, Task, TasksSpec, hookimpl, setting
from agentrig.demonstrations import Reply

COLORS = ("red", "blue", "green", "black")


@attrs.frozen(kw_only=True)
class Config:
    train: int = setting(12, help="tasks of each split")
    test: int = setting(100, help="the number of the first task of the split test")


@attrs.frozen
class Tasks:
    """Numbered tasks; each wants a color."""

    config: Config
    splits = ("train", "test")
    roles = {"train": "train", "report": "test"}  # noqa: RUF012

    def load(self, split):
        first = 0 if split == "train" else self.config.test
        return [
            Task(id=f"{split}-{i}", input={"number": i}, private={"gold": COLORS[i % 4]})
            for i in range(first, first + self.config.train)
        ]

    def demonstrate(self, task, call):
        """Make a mistake in every first reply; repair it in the second one."""
        assert call.turn == len(call.replies)
        if call.turn == 0:
            return Reply(content=call.rng.choice(("what", "why")), learn=False)
        assert call.text == f"again, not {call.replies[0].content}"
        return task.private["gold"]


def say(task_input, endpoint):
    """Ask twice by plain httpx, in one conversation."""
    messages = [{"role": "user", "content": f"color {task_input['number']}"}]
    for _ in range(2):
        body = {"model": endpoint.model, "messages": messages, **endpoint.sampling}
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        reply = httpx.post(f"{endpoint.base_url}/chat/completions", json=body, headers=headers, timeout=20)
        reply.raise_for_status()
        text = reply.json()["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"again, not {text}"}]
    return text


def exact(task, outcome, budget_s):
    return Score.ok(float(outcome.answer == task.private["gold"]))


def silent(config):
    """Return an agent that asks nothing and answers at random."""
    return lambda task_input, endpoint: "red"


def broken(config):
    def demonstrate(task, call):
        raise KeyError("no plan")

    return demonstrate


@hookimpl
def register_tasks():
    yield TasksSpec(name="colors", summary="Colors.", config=Config, build=Tasks)


@hookimpl
def register_agents():
    yield AgentSpec(name="say", summary="Asks twice.", build=lambda config: say)
    yield AgentSpec(name="silent", summary="Asks nothing.", build=silent)
    yield AgentSpec(name="broken", summary="Can't be demonstrated.", build=lambda config: say, demonstrate=broken)


@hookimpl
def register_rewards():
    yield RewardSpec(name="exact-color", summary="1 for the color.", build=lambda config: exact)


@hookimpl
def register_recipes():
    yield RecipeSpec(
        name="colors",
        summary="Says colors.",
        settings={
            "tasks": {"use": "colors"},
            "agent": {"use": "say"},
            "reward": {"use": "exact-color"},
            "adapter": {"use": "agent-match"},
            "algorithm": {"use": "grpo", "max_tokens": 8},
            "hardware": {"use": "cpu", "threads": 1},
            "runners": {"n": 1},
        },
    )
