"""What the auditor notes without a fault: replies that no answer has, held-out tasks in the words of training."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agentrig import Task
from agentrig.audit.scores import _unheard
from agentrig.audit.tasks import _shared


def rollouts(n: int, answer: str, *replies: str) -> list[Any]:
    return [
        SimpleNamespace(
            id=f"{answer[-1]}{i}",
            answer=answer,
            calls=[SimpleNamespace(span=str(at), answered=reply) for at, reply in enumerate(replies)],
        )
        for i in range(n)
    ]


def noted(rows: list[Any]) -> str:
    trained = {(row.id, call.span): 1.0 for row in rows for call in row.calls}
    step: Any = SimpleNamespace(rows=rows, trained=trained)
    return _unheard(step)


FIRST, SECOND = "SELECT name FROM car", "SELECT name FROM maker"


def test_later_replies_that_no_answer_has_are_noted_with_their_number() -> None:
    dropped = rollouts(9, FIRST, f"```{FIRST}```", SECOND)
    assert noted(dropped).startswith("the answers of 9 of 9 rollouts are an earlier reply, and not the last one")
    assert noted([*dropped, *rollouts(1, SECOND, FIRST, SECOND)]).startswith("the answers of 9 of 10")


@pytest.mark.parametrize(
    "rows",
    [
        rollouts(7, FIRST, FIRST, SECOND),
        rollouts(9, SECOND, FIRST, SECOND),
        rollouts(9, FIRST, FIRST, FIRST),
        rollouts(9, FIRST, FIRST, "The query is right, I would not change it"),
        rollouts(9, "of neither", FIRST, SECOND),
        rollouts(9, f"{FIRST}; {SECOND}", FIRST, SECOND),
        rollouts(9, FIRST, FIRST),
        [*rollouts(9, FIRST, FIRST, SECOND), *rollouts(2, SECOND, FIRST, SECOND)],
    ],
    ids=["few", "rewritten", "the same again", "a judge", "another text", "both", "one call", "some are used"],
)
def test_an_agent_that_uses_its_replies_is_not_noted(rows: list[Any]) -> None:
    assert noted(rows) == ""


def tasks(n: int, words: str, gold: str) -> list[Task]:
    return [Task(id=f"{words}-{i}", input={"text": f"{words} {i}"}, private={"gold": gold.format(i)}) for i in range(n)]


def test_held_out_tasks_that_are_training_tasks_in_other_words_are_counted() -> None:
    train = tasks(40, "list", "SELECT name FROM t{}")
    assert dict(_shared(tasks(20, "show", "SELECT name FROM t{}"), train)).popitem()[1] == 20
    assert list(_shared(tasks(20, "list", "SELECT name FROM t{}"), train)) == [
        ("training tasks too, by their input", 20)
    ]
    assert dict(_shared(tasks(20, "show", "SELECT city FROM t{}"), train)) == {"training tasks too, by their input": 0}


def test_labels_and_short_golds_are_no_sign_of_the_same_task() -> None:
    for gold in ("a label of some words", "{}"):
        found = dict(_shared(tasks(20, "show", gold), tasks(40, "list", gold)))
        assert found == {"training tasks too, by their input": 0}
