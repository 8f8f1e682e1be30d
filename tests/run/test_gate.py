"""The gate: groups that a credit does not admit are replaced by those of other tasks, bounded and the same again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
from agentrig_grpo.config import GrpoConfig
from rollouts import rollout

from agentrig import Task
from agentrig.credit import DapoConfig, GroupConfig, differ
from agentrig.errors import AgentrigError
from agentrig.plugins.loading import load
from agentrig.rollouts import Rollout
from agentrig.run.drawing import Drawing
from agentrig.run.gate import Gate
from agentrig.run.loop import samples_of

TASKS = [Task(id=f"t{i}", input={}) for i in range(8)]


def drawing(n: int = 4) -> Drawing:
    return Drawing(TASKS, GrpoConfig(tasks_per_step=n), seed=3)


def play(tasks: Sequence[Task], differing: set[str], batches: list[list[str]]) -> list[Rollout]:
    """Roll out a batch: two rollouts a task, which differ for some tasks."""
    batches.append([task.id for task in tasks])
    found = []
    for place, task in enumerate(tasks):
        for i in range(2):
            value = float(i) if task.id in differing else 1.0
            made = attrs.evolve(rollout(value, group=f"{len(batches)}-{place}"), task=task)
            found.append(attrs.evolve(made, id=f"{len(batches)}-{place}-{i}"))
    return found


def sampled(
    differing: set[str], limit: int = 4, step: int = 1, n: int = 4
) -> tuple[list[Rollout], list[list[str]], Gate]:
    gate, batches = Gate(differ, limit), list[list[str]]()
    found = gate.sample(step, drawing(n), lambda tasks: play(tasks, differing, batches))
    return found, batches, gate


def test_a_step_goes_on_until_it_is_full_with_tasks_that_it_has_not_had() -> None:
    first = [task.id for task in drawing().draw(1)]
    others = {task.id for task in TASKS} - set(first)
    found, batches, gate = sampled({first[0], *others})
    assert batches[0] == first
    assert len(batches) == 2
    assert set(batches[1]) < others
    assert len(batches[1]) == 3
    assert gate.figures == {"num_gen_batches": 2, "groups_not_admitted": 3}
    assert len(found) == 2 * 7


def test_it_is_bounded_and_goes_round_where_tasks_are_few() -> None:
    found, batches, gate = sampled(set(), limit=4)
    assert [len(batch) for batch in batches] == [4, 4, 4, 4]
    assert set(batches[0]).isdisjoint(batches[1])
    assert gate.figures == {"num_gen_batches": 4, "groups_not_admitted": 16}
    samples, left_out = samples_of(lambda groups: [[1.0] * len(g) for g in groups], found, gate.refused(found))
    assert not samples
    assert {entry.reason for entry in left_out} <= {"not-admitted"}
    _, batches, _ = sampled(set(), limit=2, n=20)
    assert [len(batch) for batch in batches] == [20, 20]


def test_without_a_gate_a_step_has_one_batch() -> None:
    spec: Any = load().find("credit", "dr-grpo").spec
    dapo: Any = load().find("credit", "dapo").spec
    for gate in (Gate.of(spec, GroupConfig()), Gate.of(dapo, DapoConfig(max_num_gen_batches=1)), Gate()):
        batches: list[list[str]] = []
        found = gate.sample(1, drawing(), lambda tasks, batches=batches: play(tasks, set(), batches))
        assert len(batches) == 1
        assert gate.refused(found) == set()
        assert gate.figures == {}
    assert Gate.of(dapo, DapoConfig()).admit is differ


def test_a_gate_that_fails_is_named() -> None:
    def broken(group: Sequence[Rollout]) -> bool:
        raise KeyError("answer")

    with pytest.raises(AgentrigError, match=r"the credit's gate failed: .*answer"):
        Gate(broken, 2).refused([rollout(1.0)])
