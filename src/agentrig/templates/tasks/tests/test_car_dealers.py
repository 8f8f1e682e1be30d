"""Tests what `car-dealers` does."""

import sqlite3
from contextlib import closing
from pathlib import Path

from agentrig_car_dealers import Config, Questions


def test_each_gold_query_gives_a_result(tmp_path: Path) -> None:
    tasks = Questions(Config(folder=str(tmp_path)))
    for split in tasks.splits:
        for task in tasks.load(split):
            with closing(sqlite3.connect(task.input["database"])) as connection:
                assert connection.execute(task.private["gold"]).fetchone() is not None, task.input["question"]


def test_another_folder_gives_the_same_tasks_under_another_root(tmp_path: Path) -> None:
    one, other = (Questions(Config(folder=str(tmp_path / name))).load("dev") for name in "ab")
    assert [task.under(other[0].root) for task in one] == other != one
