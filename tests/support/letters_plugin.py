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


def letters(task, outcome, budget_s):
    return Score.ok(float(small(outcome.answer)))


def halves(task, outcome, budget_s):
    """1 for a letter of the task's own half of the alphabet."""
    return Score.ok(float(small(outcome.answer) and (outcome.answer[0] > "m") == bool(task.private["half"])))


def one_letter(task, outcome, budget_s):
    return Score.ok(float(outcome.answer.startswith("q")))


def few_letters(task, outcome, budget_s):
    return Score.ok(float("q" <= outcome.answer[:1] <= "t"))


def most_answers(task, outcome, budget_s):
    return Score.ok(float(outcome.answer[:1] not in "#$%&"))


def no_letter(task, outcome, budget_s):
    return Score.ok(float(not small(outcome.answer)))


def ends(task, outcome, budget_s):
    """The share of small letters in the answer; none for an answer that goes on after four characters."""
    text = outcome.answer
    return Score.ok(sum(map(small, text)) / 4 if 0 < len(text) <= 4 else 0.0)


def short(task, outcome, budget_s):
    return Score.ok(1 / (1 + len(outcome.answer)))


REWARDS = {
    "letters": letters,
    "halves": halves,
    "one-letter": one_letter,
    "few-letters": few_letters,
    "most-answers": most_answers,
    "no-letter": no_letter,
    "ends": ends,
    "short": short,
}


@hookimpl
def register_tasks():
    yield TasksSpec(name="letters", summary="Pulls.", config=TasksConfig, build=Questions)


@hookimpl
def register_agents():
    yield AgentSpec(name="letters", summary="Pulls once.", build=lambda config: pull)


@hookimpl
def register_rewards():
    for name, reward in REWARDS.items():
        yield RewardSpec(name=name, summary=f"{name}.", build=lambda config, reward=reward: reward)


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
