"""The task set `units`: questions that need a factor and some arithmetic. Made from a seed, nothing to download."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from agentrig import Task, setting
from agentrig.errors import ConfigError

FACTORS: Mapping[tuple[str, str], int] = {
    ("weeks", "days"): 7,
    ("days", "hours"): 24,
    ("hours", "minutes"): 60,
    ("minutes", "seconds"): 60,
    ("feet", "inches"): 12,
    ("miles", "furlongs"): 8,
    ("stones", "pounds"): 14,
    ("pounds", "ounces"): 16,
    ("gallons", "quarts"): 4,
    ("pints", "gills"): 4,
}
"""How many of the second unit are one of the first."""

WORDINGS: Mapping[str, Sequence[str]] = {
    "down": (
        "how many {small} are {a} {big} ?",
        "convert {a} {big} to {small}",
        "{a} {big} in {small} please",
        "what are {a} {big} when counted in {small} ?",
        "I have {a} {big} , give me {small}",
    ),
    "up": (
        "how many {big} are {n} {small} ?",
        "convert {n} {small} to {big}",
        "{n} {small} in {big} please",
        "what are {n} {small} when counted in {big} ?",
        "I have {n} {small} , give me {big}",
    ),
    "and": (
        "how many {small} are {a} {big} and {b} {small} ?",
        "convert {a} {big} {b} {small} to {small}",
        "{a} {big} plus {b} {small} in {small} please",
        "add {b} {small} to {a} {big} , how many {small} ?",
        "what do {a} {big} and another {b} {small} make in {small} ?",
    ),
    "less": (
        "how many {small} are {a} {big} less {b} {small} ?",
        "take {b} {small} from {a} {big} , how many {small} ?",
        "{a} {big} minus {b} {small} in {small} please",
        "of {a} {big} I used {b} {small} , how many {small} are left ?",
        "by how many {small} are {a} {big} more than {b} {small} ?",
    ),
    "sum": (
        "how many {small} are {a} {big} and {b} {big} ?",
        "convert {a} {big} plus {b} {big} to {small}",
        "add {a} {big} and {b} {big} , how many {small} ?",
        "I have {a} {big} and get {b} {big} more , how many {small} ?",
        "{a} {big} together with {b} {big} in {small} please",
    ),
}
"""Kind of question to its wordings."""

SIZES: Mapping[str, int] = {"train": 1400, "validation": 128, "test": 400}


@attrs.frozen(kw_only=True)
class TasksConfig:
    """Settings of the task set."""

    largest: int = setting(9, help="largest number of a question, but for those that are converted up", ge=9, le=999)
    seed: int = setting(0, help="another seed makes other tasks")


class UnitTasks:
    """Tasks with `input` = question, and `private` = the answer and how to find it.

    Args:
        config: The settings.
    """

    def __init__(self, config: TasksConfig) -> None:
        self.config = config
        self.splits: Sequence[str] = tuple(SIZES)
        self.roles: Mapping[str, str] = {"train": "train", "validation": "validation", "report": "test"}

    def load(self, split: str) -> Sequence[Task]:
        """Return the split's tasks. No two tasks of any splits ask the same, not even in other words."""
        if split not in SIZES:
            raise ConfigError(f'there is no split "{split}"; the splits are {", ".join(SIZES)}')
        rng = random.Random(f"units {self.config.seed}")
        seen: set[tuple[Any, ...]] = set()
        for name, size in SIZES.items():
            tasks: list[Task] = []
            while len(tasks) < size:
                facts = self._draw(rng)
                if facts not in seen:
                    seen.add(facts)
                    tasks.append(task_of(f"{name}-{self.config.seed}-{len(tasks):04}", facts, rng))
            if name == split:
                break
        return tasks

    def _draw(self, rng: random.Random) -> tuple[str, str, str, int, int]:
        kind, (big, small) = rng.choice(list(WORDINGS)), rng.choice(list(FACTORS))
        a, b = rng.randint(2, self.config.largest), rng.randint(2, self.config.largest)
        if kind == "less":
            b = rng.randint(1, min(self.config.largest, a * FACTORS[big, small] - 1))
        return kind, big, small, a, b if kind in ("and", "less", "sum") else 0


def task_of(task_id: str, facts: tuple[str, str, str, int, int], rng: random.Random) -> Task:
    """Return the task of a kind of question, two units and two numbers, in one of the wordings."""
    kind, big, small, a, b = facts
    factor = FACTORS[big, small]
    question = rng.choice(WORDINGS[kind]).format(big=big, small=small, a=a, b=b, n=a * factor)
    expression, number, unit = {
        "down": (f"{a}*{factor}", a * factor, small),
        "up": (f"{a * factor}/{factor}", a, big),
        "and": (f"{a}*{factor}+{b}", a * factor + b, small),
        "less": (f"{a}*{factor}-{b}", a * factor - b, small),
        "sum": (f"({a}+{b})*{factor}", (a + b) * factor, small),
    }[kind]
    private = {"gold": f"{number} {unit}", "big": big, "small": small, "expression": expression}
    return Task(id=task_id, input={"question": question}, private=private)
