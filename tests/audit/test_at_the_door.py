"""What agents are given and return is compared by digests: whatever plain data it is, and only where it is another."""

from __future__ import annotations

import collections
import json
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
from agentrig.audit.record import COLUMNS, Record, Row, _row
from agentrig.pools import Job, Result
from agentrig.rewards import Score
from agentrig.rollouts import Rollout
from agentrig.run.rows import rollout_of, rollout_schema, row_of
from agentrig.runners.attempt import packed
from agentrig.runners.reward_process import NOWHERE
from agentrig.tasks import Task
from agentrig.text import masked
from agentrig.traces import GIVEN, LLM_CALL, RETURNED, SERVER

TASK = Task(
    id="t",
    input={"text": "why é?", "rows": [1, 1.0, -0.0, 1e22, None], "files": ["/data/a.db", "/data", "/database"]},
    private={"gold": "so"},
    root="/data",
)
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
    "halves of a character": lambda given, endpoint: {"both \ud83d\ude00": "of \ud83d\ude00"},
    "a secret": lambda given, endpoint: f"the key is {SECRET}",
    "a secret and halves of a character": lambda given, endpoint: f"the key is {SECRET}\ud83d\ude00",
    "a dict with items of its own": lambda given, endpoint: OtherItems(k="v"),
    "changes its input": changing,
    "judged": lambda given, endpoint: Judged(answer={"x": 1.0}, reward=0.5),
    "judged, without an answer": lambda given, endpoint: Judged(reward=0.5),
    "a whole job": Whole(),
    "async": later,
}


UNCOMPARED = ("a number of 71 bits", "a secret", "a secret and halves of a character")


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


def faults(row: Row, *, whole_rows: bool = False, task: Task = TASK) -> list[str]:
    step: Any = SimpleNamespace(sources=SimpleNamespace(whole_rows=whole_rows))
    return [verdict.detail for verdict in tasks._at_the_door(step, [row], [task])]


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


@pytest.mark.parametrize("whole_rows", [False, True])
def test_the_files_of_a_task_may_be_under_another_root_but_no_other_ones(whole_rows: bool, tmp_path: Path) -> None:
    row = recorded(AGENTS["text"], tmp_path, given=TASK.given(whole=whole_rows))
    moved = TASK.under("/elsewhere/")
    assert moved.input["files"] == ["/elsewhere/a.db", "/elsewhere", "/database"]
    assert faults(row, whole_rows=whole_rows, task=moved) == []
    other = attrs.evolve(moved, input={**moved.input, "files": ["/elsewhere/b.db", "/elsewhere", "/database"]})
    assert len(faults(row, whole_rows=whole_rows, task=other)) == 2
    assert len(faults(attrs.evolve(row, root=None), whole_rows=whole_rows, task=moved)) == 2


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
    recorded(AGENTS["halves of a character"], tmp_path, change=lambda r: (kept.append(r), r)[1])
    again = rollout_of(row_of(rollout_of(row_of(kept[0]))))
    assert {GIVEN, RETURNED} <= again.trace.spans[0].attributes.keys()


GOLDS = [
    "SELECT creation, name, budget_in_billions FROM department",
    "SELECT name FROM head ORDER BY age DESC LIMIT 1",
    "SELECT count(*) FROM management WHERE temporary",
]
ASKED = [
    {"question": f"List what is in the books of department number {i}", "query": gold} for i, gold in enumerate(GOLDS)
]


def rollout(task: int, number: int, *turns: tuple[str, str], teacher: bool = False) -> Row:
    """A rollout of one of the tasks `ASKED`: what each call asked, and what the model replied."""
    bodies: list[dict[str, Any]] = [
        {
            "request": {"messages": [{"role": "user", "content": asked}]},
            "response": {"choices": [{"message": {"content": replied}}]},
            **({"prompt_token_ids": [1], "response_token_ids": [2]} if at or not teacher else {SERVER: "teacher"}),
        }
        for at, (asked, replied) in enumerate(turns)
    ]
    spans = [{"id": str(at), "name": LLM_CALL, "error": None, "attributes": body} for at, body in enumerate(bodies)]
    texts = {"input": json.dumps(ASKED[task]), "answer": '""', "spans": json.dumps(spans), "call_values": "[]"}
    columns = dict.fromkeys(COLUMNS) | {"id": f"{task}-{number}", "task_id": str(task), "group": str(task)} | texts
    return _row(columns)


def first_turn(task: int) -> tuple[str, str]:
    return f"Write SQL. {ASKED[task]['question']}", GOLDS[task]


def turns_of(task: int, number: int) -> Row:
    """A rollout whose second call quotes the reply; the model knows most golds."""
    return rollout(task, number, first_turn(task), (f"Is this right? {GOLDS[task]}", "Yes"))


def about_another(rows: list[Row]) -> list[str]:
    return [fault.detail for fault in tasks._own_texts(rows, {str(i): one for i, one in enumerate(ASKED)})]


OTHERS_GOLD = first_turn(1)[0], GOLDS[0]
QUOTING: dict[str, Row] = {
    "whole": rollout(1, 9, OTHERS_GOLD, (f"Is this right? {GOLDS[0]}", "No"), (f"Rewrite {GOLDS[0]}", "SELECT 1")),
    "completed by the agent": rollout(
        1, 9, (OTHERS_GOLD[0], "creation, name, budget_in_billions"), (f"Is this right? {GOLDS[0]}", "No")
    ),
    "cut, and laid out anew": rollout(
        1, 9, (OTHERS_GOLD[0], f"```sql\n{GOLDS[0]};\n```"), (GOLDS[0].replace(" FROM", "\n  from"), "No")
    ),
    "another model's": rollout(1, 9, OTHERS_GOLD, (f"Is this right? {GOLDS[0]}", "No"), teacher=True),
    "beside its own question": rollout(1, 9, (f"As {GOLDS[0]}: {ASKED[1]['question']}", "SELECT 1")),
    "beside its own question, cut": rollout(1, 9, (f"{ASKED[0]['question']}? {ASKED[1]['question'][5:]}", "SELECT 1")),
}


@pytest.mark.parametrize("name", QUOTING)
def test_a_gold_of_another_task_that_a_model_wrote_is_no_call_about_that_task(name: str) -> None:
    assert about_another([*(turns_of(task, number) for task in range(3) for number in range(2)), QUOTING[name]]) == []


def test_calls_of_another_task_are_named_also_where_some_quote_replies() -> None:
    rows = [turns_of(task, number) for task in range(3) for number in range(2)]
    moved = [attrs.evolve(rows[0], calls=rows[-1].calls), attrs.evolve(rows[-1], calls=rows[0].calls)]
    (found,) = about_another([*moved, *rows[1:-1], QUOTING["whole"]])
    assert found.startswith("the first call of 2 rollouts is about another task: call 0 of rollout 2-1, task 0, has ")
    assert "question of task 2, and nothing of its own; " in found
