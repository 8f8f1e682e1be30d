"""A domain for small real trainings, as a plugin file: one question, one short answer, and rewards for its letters.

A tiny random model starts at about 0.15 with `letters`, near 0 with `one-letter`, and at 0.85 with `no-letter`.
"""

from __future__ import annotations

import attrs

from agentrig import AdapterSpec, AgentSpec, RecipeSpec, RewardSpec, Score, Task, TasksSpec, hookimpl, setting
from agentrig.testing.bandit import every_call, pull


@attrs.frozen(kw_only=True)
class TasksConfig:
    words: int = setting(0, help="words that make the prompt longer", ge=0)


@attrs.frozen
class Questions:
    """Twenty-four tasks to train with, and a hundred held out."""

    config: TasksConfig
    splits = ("train", "validation", "test")
    roles = {"train": "train", "validation": "validation", "report": "test"}  # noqa: RUF012

    def load(self, split):
        """Return the tasks of a split; every third prompt is the long one."""
        long = " please" * self.config.words
        return [
            Task(
                id=f"{split}-{i}",
                input={"question": f"{'first' if i % 2 else 'last'} {split} {i}: pull{long if i % 3 == 0 else ''}"},
                private={"half": i % 2},
            )
            for i in range(100 if split == "test" else 24)
        ]


def small(answer):
    """Whether an answer begins with a small letter."""
    return "a" <= answer[:1] <= "z"


REWARDS = {
    "letters": lambda task, text: small(text),
    # a letter of the task's own half of the alphabet
    "halves": lambda task, text: small(text) and (text[0] > "m") == bool(task.private["half"]),
    "one-letter": lambda task, text: text.startswith("q"),
    "few-letters": lambda task, text: "q" <= text[:1] <= "t",
    "most-answers": lambda task, text: text[:1] not in "#$%&",
    "no-letter": lambda task, text: not small(text),
    # none for an answer that goes on after four characters
    "ends": lambda task, text: sum(map(small, text)) / 4 if 0 < len(text) <= 4 else 0.0,
    "short": lambda task, text: 1 / (1 + len(text)),
}
"""What an answer to a task is worth."""


def rewarding(worth):
    """Return the reward that gives what an answer is worth."""
    return lambda task, outcome, budget_s: Score.ok(float(worth(task, outcome.answer)))


@hookimpl
def register_tasks():
    yield TasksSpec(name="letters", summary="Pulls.", config=TasksConfig, build=Questions)


@hookimpl
def register_agents():
    yield AgentSpec(name="letters", summary="Pulls once.", build=lambda config: pull)


@hookimpl
def register_rewards():
    for name, worth in REWARDS.items():
        yield RewardSpec(name=name, summary=f"{name}.", build=lambda config, worth=worth: rewarding(worth))


@hookimpl
def register_adapters():
    yield AdapterSpec(name="letters", summary="Every call.", build=lambda config: every_call)


@hookimpl
def register_recipes():
    yield RecipeSpec(
        name="letters",
        summary="Letters.",
        settings={
            **{kind: {"use": "letters"} for kind in ("tasks", "agent", "reward", "adapter")},
            "algorithm": {
                "use": "grpo",
                "steps": 12,
                "tasks_per_step": 12,
                "group_size": 8,
                "lr": 3e-3,
                "max_tokens": 4,
                "validate_every": 0,
                "save_every": 100,
            },
            "hardware": {"use": "cpu"},
            "run": {"block": ["report"]},
            "runners": {"n": 1, "threads": 8, "deadline_s": 60.0},
        },
    )
