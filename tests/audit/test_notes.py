"""What the auditor notes without a fault: replies that no answer has, texts that are cut, what it could not look at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agentrig import Score, Task
from agentrig.audit.scores import _unheard, score
from agentrig.audit.tasks import _cut, _shared
from agentrig.audit.verdicts import CannotLook


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


QUESTION, GOLD = "How many singers are there in task {}?", "SELECT count(*) FROM singer WHERE id = {}"


def asked(*prompts: tuple[str, ...]) -> tuple[list[Any], dict[str, dict[str, str]]]:
    """Return rollouts of whole rows, one a task, with what their calls asked, and the inputs of the tasks."""
    rows: list[Any] = [
        SimpleNamespace(task_id=str(i), calls=[SimpleNamespace(asked=text.format(i)) for text in texts])
        for i, texts in enumerate(prompts)
    ]
    return rows, {str(i): {"question": QUESTION.format(i), "query": GOLD.format(i)} for i in range(len(prompts))}


def test_a_gold_column_that_a_reply_comes_near_is_not_cut_off() -> None:
    """The agent checks the policy's query, which is the gold one but for three characters."""
    near = (QUESTION, f"{QUESTION} {GOLD[:-5]}'a'")
    assert _cut(*asked(near, (QUESTION,), (QUESTION,))) == ""
    assert _cut(*asked(near, near, near)) == "", "no first call has it: the agent was not given it to show"
    example = (f"Answer such as {GOLD[:20]} name. {QUESTION}",)
    assert _cut(*asked(example, (QUESTION,), (QUESTION,))) == "", "most tasks don't show the column"


def test_a_question_that_is_cut_off_is_noted() -> None:
    noted = _cut(*asked((QUESTION[:24], QUESTION[:20]), (QUESTION,), (QUESTION[:24], QUESTION)))
    assert noted == "the prompts cut off inputs of 1 of 3 tasks: question of task 0, 24 of 37 characters"


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([], "no rollout was scored"),
        ([("gone", "ok")] * 2, "the tasks of the 2 scored rollouts are not in the training split of the task set, loa"),
        ([("here", "ok")], "the reward gave none of 1 scored answers a score at a second scoring"),
        ([("here", "invalid")], "no rollout was scored"),
    ],
)
def test_why_no_score_was_looked_at(rows: list[tuple[str, str]], why: str) -> None:
    made = [
        SimpleNamespace(
            id=str(i), task_id=task, status=status, failure=None, value=None, answer="", group="g", calls=[]
        )
        for i, (task, status) in enumerate(rows)
    ]
    sources = SimpleNamespace(
        splits={"train": [Task(id="here", input={})]}, seconds=0.0, score=lambda task, row: Score.invalid("out")
    )
    record = SimpleNamespace(demonstrations="")
    step: Any = SimpleNamespace(rows=made, line={}, sources=sources, number=1, record=record)
    with pytest.raises(CannotLook) as failed:
        list(score(step))
    assert str(failed.value).startswith(why)
