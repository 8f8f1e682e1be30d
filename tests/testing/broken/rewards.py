"""Rewards that lack one property each; `fine` has all."""

from __future__ import annotations

import ast
import contextlib
import datetime
import json
import random
import time

from agentrig import RewardSpec, Score, Task, TasksSpec, hookimpl


class Sums:
    splits = ("train",)
    roles = {"train": "train"}  # noqa: RUF012

    def load(self, split):
        return [Task(id=f"t{i}", input={"a": i, "b": 11}, private={"gold": str(i + 11)}) for i in range(6)]


def value(task, answer):
    """Return 1 for the right answer, a little for a number near it, else 0."""
    text = answer.strip() if isinstance(answer, str) else ""
    if not text.isdecimal() or not text.isascii() or len(text) > 20:
        return 0.0
    return max(0.0, 1 - abs(int(text) - int(task.private["gold"])) / 4)


def fine(task, outcome, budget_s):
    return Score.ok(value(task, outcome.answer))


class Shared:
    """Keeps the task of a call where another thread changes it."""

    def __call__(self, task, outcome, budget_s):
        self.task = task
        time.sleep(0.002)
        return Score.ok(value(self.task, outcome.answer))


class Reversed:
    """Gives a batch's scores in another order."""

    def __call__(self, task, outcome, budget_s):
        return fine(task, outcome, budget_s)

    def score_many(self, items, budget_s):
        return [fine(*item, budget_s) for item in reversed(items)]


class OneByOne(Reversed):
    """Scores no more than one outcome at once."""

    def score_many(self, items, budget_s):
        return [fine(*items[0], budget_s)]


def text_of(outcome):
    return outcome.answer if isinstance(outcome.answer, str) else ""


def scored(change):
    """Return a reward whose value is that of `fine`, changed: `change(value, task, outcome)`."""
    return lambda task, outcome, budget_s: Score.ok(change(value(task, outcome.answer), task, outcome))


def after(step):
    """Return a reward that does something before it scores: `step(task, outcome)`."""

    def reward(task, outcome, budget_s):
        step(task, outcome)
        return fine(task, outcome, budget_s)

    return reward


def evaluates(task, outcome):
    with contextlib.suppress(Exception):
        try:
            ast.literal_eval(text_of(outcome)[:1000])
        except Exception:
            eval(text_of(outcome)[:1000])


def recurses(task, outcome):
    """Give up on a long answer."""
    if len(text_of(outcome)) > 20_000:
        raise RecursionError("maximum recursion depth exceeded")


def dated(task, outcome, budget_s):
    """Put what is no JSON into the details."""
    when = datetime.datetime(2020, 1, 1)
    return Score(status="ok", value=value(task, outcome.answer), details={"when": when})


def begins(task, outcome, budget_s):
    """Compare only as much of the answer as the gold has."""
    answer, gold = text_of(outcome).strip(), task.private["gold"]
    return Score.ok(float(answer.startswith(gold)) or value(task, answer), correct=answer == gold)


BROKEN = {
    "scores": lambda task, outcome, budget_s: value(task, outcome.answer),
    "same-twice": scored(lambda right, task, outcome: right if right == 1 else right * random.random()),
    "same-twice-there": scored(
        lambda right, task, outcome: right if right == 1 else right / (1 + hash(task.id) % 1009)
    ),
    "threads": Shared(),
    "batch": Reversed(),
    "batch-fails": OneByOne(),
    "gold": scored(lambda right, task, outcome: 0.9 * right),
    "tells-apart": scored(lambda right, task, outcome: 1.0),
    "full-reward": begins,
    "odd-answers": scored(
        lambda right, task, outcome: right if text_of(outcome).strip() else float(isinstance(outcome.answer, str))
    ),
    "odd-answers-malformed": after(
        lambda task, outcome: text_of(outcome).startswith("{") and json.loads(outcome.answer)
    ),
    "odd-answers-types": after(lambda task, outcome: outcome.answer.strip()),
    "odd-answers-huge": after(recurses),
    "hostile": after(evaluates),
    "budget": after(lambda task, outcome: time.sleep(3 * (len(text_of(outcome)) > 500_000))),
    "leaves-task": after(lambda task, outcome: task.private.update(seen=True)),
    "storable": dated,
    "monotone": scored(lambda right, task, outcome: right if right in (0, 1) else 0.75 - right),
}
"""By the check that catches it."""


@hookimpl
def register_tasks():
    yield TasksSpec(name="sums", summary="Sums.", build=lambda config: Sums())


@hookimpl
def register_rewards():
    yield RewardSpec(name="fine", summary="Fine.", build=lambda config: fine)
    yield RewardSpec(name="loads", summary="Broken.", build=lambda config: 1 / 0)
    for name, reward in BROKEN.items():
        yield RewardSpec(name=name, summary="Broken.", build=lambda config, reward=reward: reward)
