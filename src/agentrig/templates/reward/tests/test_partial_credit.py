"""Tests what `partial-credit` does."""

import sqlite3
from contextlib import closing
from pathlib import Path

from agentrig_partial_credit import Config, Reward

from agentrig import Outcome, Task


def test_a_query_that_runs_earns_a_little(tmp_path: Path) -> None:
    database = str(tmp_path / "shop.sqlite")
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.executescript("CREATE TABLE bike (model TEXT); INSERT INTO bike VALUES ('arrow'), ('comet');")
    task = Task(id="1", input={"database": database}, private={"gold": "SELECT count(*) FROM bike"})
    reward = Reward(Config(runs=0.2))
    answers = {"SELECT count(model) FROM bike": 1.0, "SELECT model FROM bike": 0.2, "SELECT price FROM bike": 0.0}
    assert {answer: reward(task, Outcome(answer=answer), 10.0).value for answer in answers} == answers
