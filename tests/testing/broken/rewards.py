"""Rewards that lack one property each; `fine` has all."""

from __future__ import annotations

import ast
import contextlib
import datetime
import json
import random
import time

import attrs

from agentrig import RewardSpec, Score, Task, TasksSpec, hookimpl


class Sums:
    """Sums of two numbers."""

    splits = ("train",)
    roles = {"train": "train"}  # noqa: RUF012

    def load(self, split):
        """Return the tasks."""
        return [Task(id=f"t{i}", input={"a": i, "b": 11}, private={"gold": str(i + 11)}) for i in range(6)]


def value(task, answer):
    """Return 1 for the right answer, a little for a number near it, else 0."""
    text = answer.strip() if isinstance(answer, str) else ""
    if not text.isdecimal() or not text.isascii() or len(text) > 20:
        return 0.0
    return max(0.0, 1 - abs(int(text) - int(task.private["gold"])) / 4)


def fine(task, outcome, budget_s):
    """Score an answer."""
    return Score.ok(value(task, outcome.answer))


def returns_a_number(task, outcome, budget_s):
    return value(task, outcome.answer)


def random_for_wrong(task, outcome, budget_s):
    right = value(task, outcome.answer)
    return Score.ok(right if right == 1 else right * random.random())


def hashes(task, outcome, budget_s):
    right = value(task, outcome.answer)
    return Score.ok(right if right == 1 else right / (1 + hash(task.id) % 1009))


class Shared:
    """Keeps the task of a call where another thread changes it."""

    def __call__(self, task, outcome, budget_s):
        """Score an answer."""
        self.task = task
        time.sleep(0.002)
        return Score.ok(value(self.task, outcome.answer))


class Reversed:
    """Gives a batch's scores in another order."""

    def __call__(self, task, outcome, budget_s):
        """Score an answer."""
        return fine(task, outcome, budget_s)

    def score_many(self, items, budget_s):
        """Score a batch."""
        return [fine(*item, budget_s) for item in reversed(items)]


def never_right(task, outcome, budget_s):
    return Score.ok(0.9 * value(task, outcome.answer))


def always_one(task, outcome, budget_s):
    return Score.ok(1.0)


def likes_silence(task, outcome, budget_s):
    return Score.ok(
        1.0 if isinstance(outcome.answer, str) and not outcome.answer.strip() else value(task, outcome.answer)
    )


def parses(task, outcome, budget_s):
    answer = outcome.answer
    if isinstance(answer, str) and answer.startswith("{"):
        json.loads(answer)
    return Score.ok(value(task, answer))


def strips(task, outcome, budget_s):
    outcome.answer.strip()
    return Score.ok(value(task, outcome.answer))


def recurses(task, outcome, budget_s):
    if isinstance(outcome.answer, str) and len(outcome.answer) > 20_000:
        raise RecursionError("maximum recursion depth exceeded")
    return Score.ok(value(task, outcome.answer))


def evaluates(task, outcome, budget_s):
    if isinstance(outcome.answer, str) and len(outcome.answer) < 1000:
        try:
            ast.literal_eval(outcome.answer)
        except Exception:
            with contextlib.suppress(Exception):
                eval(outcome.answer)
    return Score.ok(value(task, outcome.answer))


def slow(task, outcome, budget_s):
    if isinstance(outcome.answer, str) and len(outcome.answer) > 500_000:
        time.sleep(3)
    return Score.ok(value(task, outcome.answer))


def changes(task, outcome, budget_s):
    task.private["seen"] = True
    return Score.ok(value(task, outcome.answer))


def dated(task, outcome, budget_s):
    right = value(task, outcome.answer)
    return Score(status="ok", value=right, details={"when": datetime.datetime(2020, 1, 1)})


def falls(task, outcome, budget_s):
    right = value(task, outcome.answer)
    return Score.ok(right if right == 1 else 0.75 - right if right else 0.0)


def cannot_be_built(config):
    raise OSError("there is no such file: weights.bin")


BROKEN = {
    "scores": returns_a_number,
    "same-twice": random_for_wrong,
    "other-process": hashes,
    "threads": Shared(),
    "batch": Reversed(),
    "gold": never_right,
    "tells-apart": always_one,
    "empty": likes_silence,
    "malformed": parses,
    "other-types": strips,
    "huge": recurses,
    "hostile": evaluates,
    "budget": slow,
    "leaves-task": changes,
    "storable": dated,
    "monotone": falls,
}
"""By the check that catches it."""


@attrs.frozen(kw_only=True)
class Config:
    """No settings."""


@hookimpl
def register_tasks():
    yield TasksSpec(name="sums", summary="Sums.", build=lambda config: Sums())


@hookimpl
def register_rewards():
    yield RewardSpec(name="fine", summary="Fine.", build=lambda config: fine)
    yield RewardSpec(name="loads", summary="Broken.", build=cannot_be_built)
    for name, reward in BROKEN.items():
        yield RewardSpec(name=name, summary="Broken.", build=lambda config, reward=reward: reward)
