"""The task set `json-repair`: small documents with one to three faults, each with its schema. Made from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from agentrig import Task, setting
from agentrig.errors import ConfigError
from agentrig_json_repair.solver import solved

INTEGERS = ("size", "floor", "seats", "stars")
CHOICES: Mapping[str, Sequence[str]] = {
    "color": ("red", "green", "blue", "black"),
    "state": ("open", "closed", "sold", "lost"),
    "level": ("low", "middle", "high", "top"),
    "season": ("spring", "summer", "autumn", "winter"),
}
FLAGS = ("paid", "public")
TEXTS: Mapping[str, Sequence[str]] = {
    "name": ("anna", "boris", "clara", "david"),
    "city": ("oslo", "paris", "lima", "cairo"),
}
EXTRA = ("note", "draft", "temp", "debug")
SIZES: Mapping[str, int] = {"train": 4000, "validation": 200, "test": 400}


@attrs.frozen(kw_only=True)
class TasksConfig:
    """Settings of the task set."""

    properties: int = setting(4, help="most properties of a schema; at least three", ge=3, le=8)
    faults: int = setting(3, help="most faults of a document", ge=1, le=3)
    seed: int = setting(0, help="another seed makes other tasks")


class RepairTasks:
    """Tasks with `input` = schema and document, and `private` = one right document.

    Args:
        config: The settings.
    """

    def __init__(self, config: TasksConfig) -> None:
        self.config = config
        self.splits: Sequence[str] = tuple(SIZES)
        self.roles: Mapping[str, str] = {"train": "train", "validation": "validation", "report": "test"}

    def load(self, split: str) -> Sequence[Task]:
        """Return the split's tasks. Splits share no pair of schema and document."""
        seen: set[str] = set()
        for name, size in SIZES.items():
            rng = random.Random(f"json-repair {self.config.seed} {name}")
            tasks: list[Task] = []
            while len(tasks) < size:
                schema, document = self._draw(rng)
                text = json.dumps([schema, document])
                if text in seen:
                    continue
                seen.add(text)
                task_id = f"{name}-{self.config.seed}-{len(tasks):04}"
                gold = json.dumps(solved(schema, document))
                tasks.append(Task(id=task_id, input={"schema": schema, "document": document}, private={"gold": gold}))
            if name == split:
                return tasks
        raise ConfigError(f'there is no split "{split}"; the splits are {", ".join(SIZES)}')

    def _draw(self, rng: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
        names = rng.sample([*INTEGERS, *CHOICES, *FLAGS, *TEXTS], rng.randint(3, self.config.properties))
        rules = {name: _rule(name, rng) for name in names}
        schema = {"type": "object", "properties": rules, "required": names, "additionalProperties": False}
        document = {name: _value(name, rule, rng) for name, rule in rules.items()}
        broken = rng.sample([n for n in names if n not in TEXTS] or names, 1)
        rest = [n for n in names if n not in broken]
        broken += rng.sample(rest, min(len(rest), rng.randint(0, self.config.faults - 1)))
        for name in broken:
            _break(document, name, rules[name], rng)
        return schema, document


def _rule(name: str, rng: random.Random) -> dict[str, Any]:
    if name in INTEGERS:
        least = rng.randint(1, 6)
        return {"type": "integer", "minimum": least, "maximum": rng.randint(least + 1, 9)}
    if name in CHOICES:
        return {"enum": rng.sample(CHOICES[name], 3)}
    return {"type": "boolean" if name in FLAGS else "string"}


def _value(name: str, rule: Mapping[str, Any], rng: random.Random) -> Any:
    if name in INTEGERS:
        return rng.randint(rule["minimum"], rule["maximum"])
    if name in CHOICES:
        return rng.choice(rule["enum"])
    return rng.random() < 0.5 if name in FLAGS else rng.choice(TEXTS[name])


def _break(document: dict[str, Any], name: str, rule: Mapping[str, Any], rng: random.Random) -> None:
    """Put a fault into a property: a wrong type, a wrong value, or the property missing or under another name."""
    value = document[name]
    kind = rng.choice(("wrong", "wrong", "wrong", "missing", "extra"))
    if kind == "missing":
        del document[name]
    elif kind == "extra" or name in TEXTS:
        document[rng.choice(EXTRA)] = value
    elif name in INTEGERS:
        beyond = rng.choice((rng.randint(0, rule["minimum"] - 1), rule["maximum"] + rng.randint(1, 90)))
        document[name] = rng.choice((str(value), beyond))
    elif name in CHOICES:
        others = [c for c in CHOICES[name] if c not in rule["enum"]]
        document[name] = rng.choice((*others, value[:-1], value.upper()))
    else:
        document[name] = str(value).lower()
