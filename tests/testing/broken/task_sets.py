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
        """Return the words of a split."""
        return [f"{split}{word}" for word in WORDS]

    def task(self, split, i, word):
        """Return a task."""
        return Task(id=f"{split}-{i}", input={"word": word}, private={"gold": word[::-1]})

    def load(self, split):
        """Return a split's tasks."""
        return [self.task(split, i, word) for i, word in enumerate(self.words(split))]


class UnknownSplit(Reversals):
    """A role has a split that does not exist."""

    roles = {"train": "training", "report": "test"}  # noqa: RUF012


class OneId(Reversals):
    """All ids are equal."""

    def task(self, split, i, word):
        """Return a task."""
        return Task(id=split, input={"word": word}, private={"gold": word[::-1]})


class OnlyTraining(Reversals):
    """Nothing is held out."""

    splits = ("train",)
    roles = {"train": "train"}  # noqa: RUF012


class Shuffled(Reversals):
    """Another order each time."""

    def words(self, split):
        """Return the words of a split."""
        return random.sample(super().words(split), len(WORDS))


class Counted(Reversals):
    """Ids that go on counting."""

    def task(self, split, i, word):
        """Return a task."""
        return Task(id=f"t{next(COUNTER)}", input={"word": word}, private={"gold": word[::-1]})


class OrderOfASet(Reversals):
    """The order depends on the hash seed."""

    def words(self, split):
        """Return the words of a split."""
        return list({f"{split}{word}" for word in WORDS})


class Overlapping(Reversals):
    """Validation has words of the training."""

    def words(self, split):
        """Return the words of a split."""
        return super().words("train")[5:] if split == "dev" else super().words(split)


class Proxies(Reversals):
    """Inputs that cannot be pickled."""

    def task(self, split, i, word):
        """Return a task."""
        return Task(id=f"{split}-{i}", input=MappingProxyType({"word": word}), private={"gold": word[::-1]})


class GivenAway(Reversals):
    """The gold is in the input."""

    def task(self, split, i, word):
        """Return a task."""
        return Task(id=f"{split}-{i}", input={"word": word, "hint": [word[::-1]]}, private={"gold": word[::-1]})


BROKEN = {
    "loads": lambda: 1 / 0,
    "splits": UnknownSplit,
    "rows": OneId,
    "roles": OnlyTraining,
    "same-twice": Shuffled,
    "stable-ids": Counted,
    "other-process": OrderOfASet,
    "disjoint": Overlapping,
    "picklable": Proxies,
    "gold-apart": GivenAway,
}
"""By the check that catches it."""


@hookimpl
def register_tasks():
    yield TasksSpec(name="fine", summary="Fine.", build=lambda config: Reversals())
    for name, make in BROKEN.items():
        yield TasksSpec(name=name, summary="Broken.", build=lambda config, make=make: make())
