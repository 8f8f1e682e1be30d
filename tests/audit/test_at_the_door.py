"""What agents are given and return is compared by digests: whatever plain data it is, and only where it is another."""

from __future__ import annotations

import collections
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrig.agents import Judged, Outcome
from agentrig.audit import tasks
from agentrig.audit.record import Record, Row
from agentrig.pools import Job, Result
from agentrig.rewards import Score
from agentrig.rollouts import Rollout
from agentrig.run.rows import rollout_of, rollout_schema, row_of
from agentrig.runners.attempt import packed
from agentrig.runners.reward_process import NOWHERE
from agentrig.tasks import Task
from agentrig.text import masked
from agentrig.traces import GIVEN, RETURNED

TASK = Task(id="t", input={"text": "why é?", "rows": [1, 1.0, -0.0, 1e22, None]}, private={"gold": "so"})
SECRET = "sk-very-secret"
Pair = collections.namedtuple("Pair", "a b")


async def later(given: Any, endpoint: Any) -> Any:
    return "an answer of an async agent"


def changing(given: Any, endpoint: Any) -> str:
    given["rows"].append(given.pop("text"))
    return "an answer"


class OtherItems(dict[str, str]):
    """JSON holds of it what its own method says."""

    def items(self) -> Any:
        return [("a", 1)]


class Whole:
    def run_job(self, job: Job) -> Any:
        return {"got": job.input}


AGENTS: dict[str, Any] = {
    "text": lambda given, endpoint: given["text"],
    "None": lambda given, endpoint: None,
    "tuples": lambda given, endpoint: {"b": (1, (2, 3)), "a": ()},
    "named tuple": lambda given, endpoint: [Pair(1, 2)],
    "numbers": lambda given, endpoint: [1.0, 1, -0.0, 1e22, 0.1 + 0.2, 2**63, True],
    "a number of 71 bits": lambda given, endpoint: 2**70,
    "a number of numpy": lambda given, endpoint: np.float64(1.0),
    "a lone surrogate": lambda given, endpoint: {"half \ud800": "of \udfff"},
    "a secret": lambda given, endpoint: f"the key is {SECRET}",
    "a secret and a lone surrogate": lambda given, endpoint: f"the key is {SECRET}\ud800",
    "a dict with items of its own": lambda given, endpoint: OtherItems(k="v"),
    "changes its input": changing,
    "judged": lambda given, endpoint: Judged(answer={"x": 1.0}, reward=0.5),
    "judged, without an answer": lambda given, endpoint: Judged(reward=0.5),
    "a whole job": Whole(),
    "async": later,
}


UNCOMPARED = ("a number of 71 bits", "a secret", "a secret and a lone surrogate")


def recorded(agent: Any, folder: Path, *, given: Any = None, change: Callable[[Rollout], Rollout] | None = None) -> Row:
    """Run an agent as a runner does, store the rollout as a run does, and read it as the auditor does."""
    job = Job(id="r", input=dict(TASK.input, rows=[*TASK.input["rows"]]) if given is None else given, endpoint=NOWHERE)
    result = Result.unpacked("r", packed(agent, job))
    rollout = Rollout(
        id="r",
        task=TASK,
        group="g",
        mode="train",
        step=1,
        outcome=result.outcome,
        score=Score.ok(1.0) if result.outcome.failure is None else None,
        trace=result.trace,
        start=result.start,
        duration_s=result.duration_s,
    )
    (folder / "rollouts").mkdir()
    (folder / "config.toml").write_text('[algorithm]\nuse = "grpo"\n')
    row = row_of(change(rollout) if change else rollout)
    pq.write_table(pa.Table.from_pylist([row], rollout_schema(pa)), folder / "rollouts" / "train-00001.parquet")
    (found,) = Record(folder).rows("train", 1)
    return found


def faults(row: Row, *, whole_rows: bool = False) -> list[str]:
    step: Any = SimpleNamespace(sources=SimpleNamespace(whole_rows=whole_rows))
    return [verdict.detail for verdict in tasks._at_the_door(step, [row], [TASK])]


@pytest.mark.parametrize("name", AGENTS)
def test_what_was_given_and_returned_is_what_is_recorded(name: str, tmp_path: Path) -> None:
    with masked(SECRET, "<the key>"):
        row = recorded(AGENTS[name], tmp_path)
    assert row.failure is None
    assert row.given is not None
    assert (row.returned is None) == (name in UNCOMPARED)
    assert faults(row) == []


@pytest.mark.parametrize("name", [name for name in AGENTS if name not in UNCOMPARED])
def test_another_answer_than_the_one_that_was_returned_is_named(name: str, tmp_path: Path) -> None:
    row = recorded(AGENTS[name], tmp_path, change=lambda r: attrs.evolve(r, outcome=attrs.evolve(r.outcome, answer=7)))
    assert faults(row) == ["the agent returned another answer than the one that is recorded in 1 rollout: r"]


def test_another_input_than_the_tasks_is_named(tmp_path: Path) -> None:
    row = recorded(AGENTS["text"], tmp_path, given={**TASK.input, "rows": [1, 1, -0.0, 1e22, None]})
    assert faults(row) == ["the runner gave the agent another input than the task's in 1 rollout: r"]


def test_an_agent_gets_whole_rows_where_it_asks_for_them_and_only_there(tmp_path: Path) -> None:
    row = recorded(AGENTS["text"], tmp_path, given=TASK.given(whole=True))
    assert faults(row, whole_rows=True) == []
    assert len(faults(row)) == 1


def test_a_rollout_without_digests_is_not_compared(tmp_path: Path) -> None:
    """As in a record of before there were digests, or of what failed."""
    row = recorded(lambda given, endpoint: object(), tmp_path)
    assert row.failure == "bad-answer"
    assert row.given is not None
    assert row.returned is None
    assert faults(attrs.evolve(row, given=None)) == []


def test_a_rollout_that_its_run_refused_has_no_other_answer(tmp_path: Path) -> None:
    refused = {"outcome": Outcome(failure="stale-weights"), "score": None}
    row = recorded(AGENTS["text"], tmp_path, change=lambda r: attrs.evolve(r, **refused))
    assert row.returned is not None
    assert faults(row) == []


def test_stored_rollouts_keep_the_digests_when_they_are_stored_again(tmp_path: Path) -> None:
    kept: list[Rollout] = []
    recorded(AGENTS["a lone surrogate"], tmp_path, change=lambda r: (kept.append(r), r)[1])
    again = rollout_of(row_of(rollout_of(row_of(kept[0]))))
    assert {GIVEN, RETURNED} <= again.trace.spans[0].attributes.keys()
