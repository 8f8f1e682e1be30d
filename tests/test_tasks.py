"""Tasks: their fingerprint, and how splits are compared."""

from __future__ import annotations

from typing import Any

import pytest

from agentrig import Task
from agentrig.tasks import fingerprint, overlap


def task(**input: Any) -> Task:
    return Task(id="a", input={"question": "How many?", **input}, private={"gold": "SELECT 1"})


def test_private_stays_out_of_what_is_printed() -> None:
    assert "SELECT 1" not in repr(task())


def test_tasks_are_frozen() -> None:
    with pytest.raises(AttributeError):
        task().id = "b"  # type: ignore[misc]


def test_the_fingerprint_does_not_depend_on_the_folder() -> None:
    here, there = task(database="/home/me/data/x.sqlite"), task(database="/mnt/x.sqlite")
    assert fingerprint([here]) == fingerprint([there])
    assert fingerprint([task(nested={"database": "/a/x"})]) == fingerprint([task(nested={"database": "/b/x"})])
    assert fingerprint([task(files=["/a/x"])]) == fingerprint([task(files=["/b/x"])])


def test_every_change_changes_the_fingerprint() -> None:
    first = task(database="/a/x.sqlite")
    others = [
        task(database="/a/y.sqlite"),
        Task(id="b", input=first.input, private=first.private),
        Task(id="a", input=first.input, private={"gold": "SELECT 2"}),
        task(database="/a/x.sqlite", more=1),
    ]
    prints = {fingerprint([t]) for t in (first, *others)}
    assert len(prints) == 5
    assert fingerprint([first, others[0]]) != fingerprint([others[0], first])


def test_the_fingerprint_is_stable_over_releases() -> None:
    known = "53bb1698e03d0e2ede5c8ae165f2414acf245ec739d9c1803086ae439b20a714"
    assert fingerprint([Task(id="a", input={"b": 1, "a": 2})]) == known
    assert fingerprint([Task(id="a", input={"a": 2, "b": 1})]) == known


def test_overlap_compares_what_the_agent_sees() -> None:
    train = [task(number=i) for i in range(5)]
    same = Task(id="other", input={"number": 3, "question": "How many?"}, private={"gold": "another"})
    assert overlap(train, [same, task(number=9)]) == [(train[3], same)]
    assert overlap([], train) == []
