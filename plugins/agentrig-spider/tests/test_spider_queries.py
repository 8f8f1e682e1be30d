"""The queries in the calls of a rollout, and what they score."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from agentrig_spider.queries import queries_of
from agentrig_spider.rewards import ExecMatch, ExecMatchReward
from sqlite_files import sqlite_file

from agentrig import Outcome, Span, Task, Trace
from agentrig.traces import LLM_CALL, NODE

ENDLESS = "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM r) SELECT count(*) FROM r"
RIGHT = "SELECT name FROM band"


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "band" / "band.sqlite"
    path.parent.mkdir()
    return sqlite_file(path, "CREATE TABLE band (name TEXT, age INT)", band=[("Ada", 3), ("Bo", 4)])


def trace_of(*messages: dict[str, Any]) -> Trace:
    root = Span(id="root", parent=None, name="rollout", start=0.0, end=1.0)
    calls = [
        Span(
            id=str(i),
            parent="root",
            name=LLM_CALL,
            start=0.0,
            end=1.0,
            attributes={"response": {"choices": [{"message": message}]}},
        )
        for i, message in enumerate(messages)
    ]
    return Trace(rollout_id="r", spans=(root, *calls))


def said(text: str | None) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def tool(arguments: Any) -> dict[str, Any]:
    function = {"name": "run", "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("message", "query"),
    [
        (said(RIGHT), RIGHT),
        (said(f"Here:\n```sql\n{RIGHT}\n```"), RIGHT),
        (said("Done."), None),
        (said("```python\nprint(1)\n```"), None),
        (said(""), None),
        (said(None), None),
        (said("word " * 8000), None),
        (tool({"query": RIGHT}), RIGHT),
        (tool({"sql": RIGHT}), RIGHT),
        (tool({"table_names": "band"}), None),
        (tool({"query": 3}), None),
        (tool("not JSON"), None),
        (tool("[" * 100_000), None),
        ({"tool_calls": "none"}, None),
        ({}, None),
    ],
)
def test_a_calls_query_is_in_its_tool_call_or_its_text(message: dict[str, Any], query: str | None) -> None:
    assert queries_of(trace_of(message)) == [query]


def test_where_nodes_say_which_query_they_wrote_a_quoted_one_is_none() -> None:
    def node(name: str, parent: str, output: Any) -> Span:
        attributes = {NODE: name, "output": output}
        return Span(id=name, parent=parent, name="chain.chain", start=0, end=1, attributes=attributes)

    first, second = (attributes.attributes for attributes in trace_of(said(RIGHT), said(RIGHT)).spans[1:])
    spans = [
        node("graph", "root", {"query": "SELECT 3"}),
        node("write", "graph", {"query": "SELECT 1"}),
        Span(id="0", parent="write", name=LLM_CALL, start=0, end=1, attributes=first),
        node("check", "graph", {"correct": True}),
        Span(id="1", parent="check", name=LLM_CALL, start=0, end=1, attributes=second),
    ]
    assert queries_of(Trace(rollout_id="r", spans=spans)) == ["SELECT 1", None]


def scored(database: Path, messages: list[dict[str, Any]], answer: str = RIGHT, budget_s: float = 5.0) -> Any:
    task = Task(id="t", input={"database": str(database)}, private={"gold": RIGHT})
    return ExecMatchReward(ExecMatch())(task, Outcome(answer=answer), budget_s, trace_of(*messages))


def test_a_query_that_fails_is_wrong_and_one_that_runs_too_long_is_not_judged(database: Path) -> None:
    start = time.monotonic()
    score = scored(database, [said("SELECT nothing"), said(ENDLESS), said("Let me see."), said(RIGHT)], budget_s=1.0)
    assert time.monotonic() - start < 3
    assert (score.status, score.value, list(score.calls)) == ("ok", 1.0, [0.0, None, None, 1.0])
    assert "1 of 4 calls wrote a query that could not be judged" in score.details["calls"]


def test_an_answer_that_takes_the_whole_time_has_its_own_verdict(database: Path) -> None:
    score = scored(database, [said(RIGHT), said(ENDLESS)], answer=ENDLESS, budget_s=0.5)
    assert (score.status, score.value, score.calls[1]) == ("timeout", 0.0, 0.0)


def test_the_gold_and_equal_queries_are_executed_once(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executed: list[str] = []
    run = ExecMatch._run

    def counted(self: Any, path: str, mark: Any, sql: str, *more: Any) -> Any:
        executed.append(sql)
        return run(self, path, mark, sql, *more)

    monkeypatch.setattr(ExecMatch, "_run", counted)
    wrong = "SELECT age FROM band"
    task = Task(id="t", input={"database": str(database)}, private={"gold": RIGHT})
    items = [(task, Outcome(answer=wrong), trace_of(said(wrong), said("SELECT 1"), said(wrong)))] * 8
    scores = ExecMatchReward(ExecMatch()).score_many(items, 5.0)
    assert {score.calls for score in scores} == {(0.0, 0.0, 0.0)}
    assert sorted(executed) == sorted([RIGHT, wrong, "SELECT 1"])


def test_without_a_trace_no_call_is_scored(database: Path) -> None:
    task = Task(id="t", input={"database": str(database)}, private={"gold": RIGHT})
    assert ExecMatchReward(ExecMatch())(task, Outcome(answer=RIGHT), 5.0).calls == ()
