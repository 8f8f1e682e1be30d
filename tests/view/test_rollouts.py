"""The report shows a few rollouts whole: their conversation, tokens, fate in training, and score."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from agentrig import Score, Span, Trace
from agentrig.cli.entry import main
from agentrig.run.directory import RunDirectory
from agentrig.testing.run_directory import rollout_of, write_run
from agentrig.traces import FEEDBACK, LLM_CALL, NODE, REWARD
from agentrig.view import build_report
from agentrig.view.rollout import differences, question, readable, readable_rollout

pytestmark = pytest.mark.usefixtures("quick_images")


def whole(page: Path) -> list[str]:
    return re.findall(r'<details class="rollout">.*?(?=<details class="rollout">|<h2)', page.read_text(), re.DOTALL)


def test_a_trained_call_has_its_advantage_and_each_token_its_probability(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=2, held_out=4)
    words = {"rollout": "train-2-0", "node": "write_query", "reason": None, "place": "trained", "tokens": 20}
    row = {**words, "span": "train-2-0-0-call", "advantage": 0.75}
    RunDirectory(directory).write_calls([row, {**row, "rollout": "train-2-9"}], step=2)
    shown = whole(build_report([directory]))
    (trained,) = (text for text in shown if "advantage" in text)
    assert "trained (20 tokens)" in trained
    assert "advantage +0.750" in trained
    assert trained.count('title="p = 0.905">[0]</i>') == 4, "four calls; without the tokenizer tokens are ids"
    assert "train, step 2" in trained
    assert "How many singers are older than 30?" in trained
    assert "Never shown to the agent" in trained
    assert all("held out, step" in text for text in shown if "train, step" not in text)


def test_what_cannot_be_read_is_named_and_not_shown_as_if_it_were_missing(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=2, held_out=4)
    text = build_report([directory]).read_text()
    assert "the run&#39;s tokenizer is not here" in text
    assert "damaged" not in text
    (directory / "calls").mkdir(exist_ok=True)
    (directory / "calls" / "train-00002.parquet").write_bytes(b"PAR1 cut off")
    (directory / "checkpoints" / "step-00002").mkdir(parents=True)
    (directory / "checkpoints" / "step-00002" / "tokenizer.json").write_text("{")
    text = build_report([directory]).read_text()
    assert "calls/train-00002.parquet is damaged, so it is not known which calls were trained" in text
    assert re.search(r"the run&#39;s tokenizer \S*/step-00002/tokenizer.json is damaged", text)


def test_long_prompts_are_folded_and_cut_in_the_file(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=1, held_out=2)
    short = build_report([directory]).stat().st_size
    rollout = rollout_of(0, right=True, mode="train", step=1)
    prompt = "a table of 30,000 characters " * 1000
    spans = []
    for span in rollout.trace.spans:
        if "request" in span.attributes:
            request = {"messages": [{"role": "user", "content": prompt}]}
            span = attrs.evolve(span, attributes={**span.attributes, "request": request})
        spans.append(span)
    changed = attrs.evolve(rollout, trace=Trace(rollout_id=rollout.id, spans=spans))
    RunDirectory(directory).write_rollouts([changed], mode="train", step=1)
    page = build_report([directory])
    text = page.read_text()
    assert text.count('<details class="long"><summary>a table of') == 1, "the second call repeats the message"
    assert '<pre tabindex="0" role="region" aria-label="user">a table' in text
    assert "(cut from 29000 characters)" in text
    assert page.stat().st_size - short < 5_000


def test_the_feedback_of_a_score_and_of_a_reward_inside_the_rollout_is_on_the_page(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=1, held_out=2)
    rollout = rollout_of(0, right=False, mode="train", step=1)
    said = {REWARD: 0.25, FEEDBACK: "the first query only lacked a comma"}
    span = Span(id="r", parent=rollout.trace.spans[0].id, name="reward", start=1.0, end=1.0, attributes=said)
    trace = Trace(rollout_id=rollout.id, spans=[*rollout.trace.spans, span])
    score = Score.ok(0.3, feedback="the query has no such column")
    RunDirectory(directory).write_rollouts([attrs.evolve(rollout, trace=trace, score=score)], mode="train", step=1)
    text = build_report([directory], gold=True).read_text()
    for feedback in (said[FEEDBACK], "the query has no such column"):
        assert str(feedback) in text


def test_a_node_around_a_routing_function_is_shown_with_its_output() -> None:
    rows: list[tuple[str, str | None, Any]] = [
        ("graph", None, {"query": "SELECT 1", "feedback": "fine"}),
        ("check", "graph", {"feedback": "fine", "turn": 2}),
        ("ask", "check", "is it right?"),
        ("route", "check", "write"),
    ]
    spans = [
        {"id": id, "parent": parent, "name": "chain.chain", "attributes": {NODE: id, "output": output}}
        for id, parent, output in rows
    ]
    seen = readable({"spans": spans}, {}, None)
    assert [part.id for part in seen.parts] == ["ask", "route", "check"], "the graph has nothing of its own"
    assert [node.id for node in seen.tree] == ["graph", "check", "ask", "route"]
    (check,) = seen.nodes
    assert (check.texts, check.facts) == ([("feedback", "fine")], [("turn", "2")])


@pytest.mark.parametrize("asked", [False, True])
def test_gold_answers_are_in_the_file_only_if_asked_for(
    ended_run: Callable[..., Path], toy_file: str, tmp_path: Path, asked: bool
) -> None:
    page = tmp_path / "page.html"
    words = ["report", str(ended_run()), "--out", str(page), *["--gold"] * asked]
    done = CliRunner().invoke(main, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert bool(re.search(r"gold-[0-9a-f]{12}", text)) is asked
    assert ("`agentrig report RUN --gold` adds it" in text) is not asked


@pytest.mark.parametrize("asked", [False, True])
def test_feedback_is_in_the_file_only_with_gold_answers(tmp_path: Path, asked: bool) -> None:
    directory = write_run(tmp_path / "run", steps=2, held_out=4)
    said = {"feedback": "the right answer is 42", "expected": 42.5, "reason": "no such column"}
    for file in (directory / "rollouts").glob("*.parquet"):
        table = pq.read_table(file)
        rows = [{**row, "details": json.dumps(said)} for row in table.to_pylist()]
        pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), file)
    text = build_report([directory], gold=asked).read_text()
    assert [word in text for word in ("the right answer is 42", "42.5", "no such column")] == [asked, asked, True]


def test_two_rollouts_say_who_speaks_and_each_text_once() -> None:
    short, long = (readable_rollout(rollout_of(0, right=n == 1, mode="train", step=1, turns=n)) for n in (1, 2))
    rows = differences(short, long)
    assert rows[:2] == [
        ("same", line, line) for line in ("▸ write_query · user", "How many singers are older than 30?")
    ]
    said = [line for _, line, _ in rows if line]
    assert not any('"role"' in line for line in said)
    assert said.count("VERDICT: CORRECT") == 1
    assert said[-2:] == ["▸ answer", short.answer]
    assert rows[-2][0] == "same"
    assert ("b", "", "▸ rewrite_query · model") in rows
    assert "▸ execute_query · result" in said


def test_a_tool_call_is_shown_once_although_the_next_call_repeats_it() -> None:
    def message(arguments: str) -> dict[str, Any]:
        function = {"name": "price", "arguments": arguments}
        return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": function}]}

    asked = [{"role": "user", "content": "What does a pen cost?"}]
    again = [*asked, message('{"item": "pen"}'), {"role": "tool", "content": "3"}]
    replies = [message('{"item":"pen"}'), {"role": "assistant", "content": "It costs 3."}]
    spans = [
        {"id": str(i), "name": LLM_CALL, "start": i, "end": i + 1, "attributes": {
            "request": {"messages": messages}, "response": {"choices": [{"message": reply}]},
        }}
        for i, (messages, reply) in enumerate(zip((asked, again), replies, strict=True))
    ]  # fmt: skip
    seen = readable({"spans": spans}, {}, None)
    who = ["user", "model", "the tool's answer", "model", "answer"]
    assert [who.rpartition(" · ")[2] for who, _ in seen.conversation] == who
    assert seen.calls[1].repeated == 2
    again[1] = message('{"item": "pencil"}')
    assert readable({"spans": spans}, {}, None).calls[1].repeated == 1, "not what the model replied"


def test_lines_that_both_have_are_folded() -> None:
    first = rollout_of(0, right=True, mode="train", step=1)
    asked = {"request": {"messages": [{"role": "user", "content": "\n".join(map(str, range(100)))}]}}
    spans = [
        attrs.evolve(span, attributes={**span.attributes, **asked}) if "request" in span.attributes else span
        for span in first.trace.spans
    ]
    seen = readable_rollout(attrs.evolve(first, trace=attrs.evolve(first.trace, spans=tuple(spans))))
    rows = differences(seen, seen)
    assert len(rows) < 30
    assert any(re.fullmatch(r"… \d+ lines that are the same …", line) for _, line, _ in rows)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"words": "two thousand"}, "two thousand"),
        ({"db": "zoo", "question": "How many?"}, "How many?"),
        ({"a": "one", "n": 3, "b": ""}, "one · 3"),
        ({"words": "x" * 1000}, f"{'x' * 300} … (cut from 1000 characters)"),
        ({}, "task-7"),
    ],
)
def test_a_task_without_a_question_is_named_by_its_input(given: dict[str, Any], said: str) -> None:
    assert question({"input": given, "task_id": "task-7"}) == said


def test_a_file_of_the_task_is_named_without_the_folders_of_this_machine() -> None:
    given = {
        "database": "/home/me/.cache/zoo/zoo.sqlite",
        "question": "/think of 3/4",
        "unit": "km/h",
        "root": "/",
    }
    shown = dict(readable({"input": given}, {}, None).input)
    assert shown == {**given, "database": "…/zoo.sqlite"}
