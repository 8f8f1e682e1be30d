"""The tasks `car-dealers`: questions about a small database, each with the query that answers it."""

from __future__ import annotations

import os
import random
import sqlite3
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import MappingProxyType

import attrs

from agentrig import Task, TasksSpec, hookimpl, setting
from agentrig.errors import AgentrigError

CITIES = ("paris", "rome", "oslo", "madrid", "berlin", "lima")
CLUBS = ("amber", "beacon", "comet", "delta", "falcon", "maple")
COLORS = ("red", "blue", "green", "black", "white", "silver")
MODELS = ("arrow", "aurora", "breeze", "canyon", "coral", "drift", "ember", "flame", "frost", "oasis", "pearl", "wave")
CONDITIONS = [(f"whose color is {color}", f"color = '{color}'") for color in COLORS]
CONDITIONS += [(f"whose {name} is above {n}", f"{name} > {n}") for name in ("price", "speed") for n in range(20, 90, 5)]
QUESTIONS = (
    ("How many cars {words} are there?", "SELECT count(*) FROM car WHERE {condition}"),
    ("List the models of the cars {words}.", "SELECT model FROM car WHERE {condition}"),
    ("What is the average price of the cars {words}?", "SELECT avg(price) FROM car WHERE {condition}"),
    ("What is the total speed of the cars {words}?", "SELECT sum(speed) FROM car WHERE {condition}"),
)


@attrs.frozen(kw_only=True)
class Config:
    """The settings: `[tasks]` of a run file."""

    folder: str = setting("", help="where the database is written; empty for $AGENTRIG_CACHE, else ~/.cache/agentrig")
    seed: int = setting(0, help="of the database's rows", ge=0)


class Questions:
    """What `build` returns. Each question is in one split, and has the same id in every run."""

    splits: Sequence[str] = ("train", "dev", "test")
    roles: Mapping[str, str] = MappingProxyType({"train": "train", "validation": "dev", "report": "test"})
    held_out: Sequence[str] = ("test",)

    def __init__(self, config: Config) -> None:
        cache = config.folder or os.environ.get("AGENTRIG_CACHE") or "~/.cache/agentrig"
        self._database = Path(cache).expanduser().absolute() / "car-dealers" / f"{config.seed}.sqlite"
        self._seed = config.seed

    def load(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split: the agent gets `input`, only the reward gets `private`."""
        if not self._database.exists():
            write_database(self._database, self._seed)
        rows = [
            (question.format(words=words), gold.format(condition=condition))
            for question, gold in QUESTIONS
            for words, condition in CONDITIONS
        ]
        order = random.Random(0).sample(range(len(rows)), len(rows))
        places = {"train": order[:80], "dev": order[80:106], "test": order[106:]}[split]  # no question in two of them
        given = {"database": str(self._database), "db_id": "car-dealers"}
        root = str(self._database.parent)
        return [
            Task(id=f"car-{i:03d}", input={"question": rows[i][0], **given}, private={"gold": rows[i][1]}, root=root)
            for i in places
        ]


def write_database(path: Path, seed: int) -> None:
    """Write the database under another name first: other processes see all of it, or nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        wrong = f"the folder {path.parent} cannot be made: {error.strerror}"
        raise AgentrigError(f"{wrong}. Name another one: tasks.folder=DIR, or AGENTRIG_CACHE") from error
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        with closing(sqlite3.connect(made)) as connection, connection:
            connection.execute("CREATE TABLE store (store_id INTEGER PRIMARY KEY, club TEXT, city TEXT)")
            connection.execute(
                "CREATE TABLE car (model TEXT, color TEXT, price INTEGER, speed INTEGER, store_id INTEGER)"
            )
            stores = [(i, club, rng.choice(CITIES)) for i, club in enumerate(CLUBS, start=1)]
            connection.executemany("INSERT INTO store VALUES (?, ?, ?)", stores)
            prices, speeds = (rng.sample(range(12, 96, 7), len(MODELS)) for _ in "12")  # some above each threshold
            colors, owners = rng.sample(COLORS * 2, len(MODELS)), rng.choices(range(1, len(CLUBS) + 1), k=len(MODELS))
            cars = list(zip(MODELS, colors, prices, speeds, owners, strict=True))
            connection.executemany("INSERT INTO car VALUES (?, ?, ?, ?, ?)", cars)
        made.replace(path)


@hookimpl
def register_tasks() -> Iterable[TasksSpec]:
    """Register `car-dealers`."""
    yield TasksSpec(
        name="car-dealers",
        summary="Questions about cars and the stores that sell them.",
        config=Config,
        build=Questions,
    )
