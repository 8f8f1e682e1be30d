"""Tests what `partial-credit` does."""

from pathlib import Path

from agentrig_partial_credit import Config, Reward

from agentrig import Outcome, Task


def test_a_query_that_runs_earns_a_little(one_table_database: Path) -> None:
    gold = {"gold": "SELECT count(*) FROM animal"}
    task = Task(id="1", input={"database": str(one_table_database)}, private=gold)
    reward = Reward(Config(runs=0.2))
    answers = {"SELECT count(id) FROM animal": 1.0, "SELECT name FROM animal": 0.2, "SELECT price FROM animal": 0.0}
    assert {answer: reward(task, Outcome(answer=answer), 10.0).value for answer in answers} == answers
