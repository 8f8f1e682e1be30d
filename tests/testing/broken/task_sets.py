"""Task sets that lack one property each; `fine` has all."""

from __future__ import annotations

import itertools
import random
from types import MappingProxyType

from agentrig import Task, TasksSpec, hookimpl

WORDS = ("ash", "beech", "cedar", "elm", "fir", "hazel", "larch", "maple", "oak", "pine")
COUNTER = itertools.count()


class Reversals:
    """Words to write backwards."""

    splits = ("train", "dev", "test")
    roles = {"train": "train", "validation": "dev", "report": "test"}  # noqa: RUF012

    def words(self, split):
        return [f"{split}{word}" for word in WORDS]

    def task(self, split, i, word):
        return Task(id=f"{split}-{i}", input={"word": word}, private={"gold": word[::-1]})

    def load(self, split):
        return [self.task(split, i, word) for i, word in enumerate(self.words(split))]


def changed(**members):
    """Return such a task set with another attribute, or another method."""
    return type("Changed", (Reversals,), members)


def task(given=lambda word: {"word": word}, name=lambda split, i: f"{split}-{i}", row=lambda word: None):
    """Return a method that makes a task, with another id, with more in its input, or with its row."""

    def make(self, split, i, word):
        return Task(id=name(split, i), input=given(word), private={"gold": word[::-1]}, row=row(word))

    return make


BROKEN = {
    "loads": lambda: 1 / 0,
    "splits": changed(roles={"train": "training", "report": "test"}),
    "rows": changed(task=task(name=lambda split, i: split)),
    "roles": changed(splits=("train",), roles={"train": "train"}),
    "same-twice": changed(words=lambda self, split: random.sample(Reversals.words(self, split), len(WORDS))),
    "same-twice-ids": changed(task=task(name=lambda split, i: f"t{next(COUNTER)}")),
    "same-twice-there": changed(words=lambda self, split: list(set(Reversals.words(self, split)))),
    "disjoint": changed(
        words=lambda self, split: Reversals.words(self, "train")[5:] if split == "dev" else Reversals.words(self, split)
    ),
    "rows-picklable": changed(task=task(row=lambda word: MappingProxyType({"word": word}))),
    "gold-apart": changed(task=task(lambda word: {"word": word, "hint": [word[::-1]]})),
}
"""By the check that catches it."""


@hookimpl
def register_tasks():
    yield TasksSpec(name="fine", summary="Fine.", build=lambda config: Reversals())
    for name, make in BROKEN.items():
        yield TasksSpec(name=name, summary="Broken.", build=lambda config, make=make: make())
