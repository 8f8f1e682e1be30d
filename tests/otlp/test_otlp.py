"""Traces as OpenTelemetry spans: a real receiver gets what the run's Parquet files hold; see docs/how-to/traces.md."""

from __future__ import annotations

import base64
import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner, Result
from google.protobuf.json_format import ParseDict
from model_server import ModelServer
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.schemas import Schemas
from otlp_receiver import receiving, spans_in
from rollouts import rollout

from agentrig.cli.entry import main
from agentrig.observers import RunEnd, RunStart
from agentrig.otlp import exporting
from agentrig.otlp.exporting import Otlp, OtlpConfig
from agentrig.otlp.spans import PROMPT_IDS, REQUEST, RESPONSE_IDS, SCHEMA, Origin, span_id, spans_of, trace_id
from agentrig.rewards import Score
from agentrig.rollouts import Rollout
from agentrig.run.rows import stored_rollouts
from agentrig.tasks import Task
from agentrig.traces import FEEDBACK, LLM_CALL, NODE, REWARD, Span, Trace

ORIGIN = Origin(run="r", agent="sql", reward="exact")


def invoke(*words: str) -> str:
    done = CliRunner().invoke(main, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_collector_gets_the_spans_of_the_run(model: ModelServer, tmp_path: Path, toy_file: str) -> None:
    """Parents, times, errors and scores; `export-traces` sends the same again; a file has the token ids too."""
    settings = [f"algorithm.endpoint={model.url}", f"run.directory={tmp_path}/runs", "run.name=toy"]
    settings += ['run.block=["report"]', 'tasks.do=["raise", "", ""]', "run.failure_limit=1", "algorithm.steps=2"]
    with receiving() as live:
        invoke("train", "toy", "--plugin", toy_file, *settings, "--otlp", live.url, "--json")
    run = tmp_path / "runs" / "toy"
    rollouts = [r for batch in stored_rollouts(run / "rollouts", size=7) for r in batch]
    assert len(rollouts) > 24
    wanted = {f"{trace_id(r.id):032x}/{span_id(r.id, s.id):016x}": (r, s) for r in rollouts for s in r.trace.spans}
    assert set(live.spans) == set(wanted)
    for key, (each, span) in wanted.items():
        seen = live.spans[key]
        parent = span.parent and f"{span_id(each.id, span.parent):016x}"
        assert (seen["parent"], seen["start"]) == (parent, round(span.start * 1e9))
        assert seen["end"] == round(span.end * 1e9)
        assert (seen["error"] is None) == (span.error is None and (span.parent is not None or not each.failure))
        assert seen["resource"]["agentrig.run"] == "toy"
    roots = {r.id: live.spans[f"{trace_id(r.id):032x}/{span_id(r.id, r.trace.spans[0].id):016x}"] for r in rollouts}
    for each in rollouts:
        root = roots[each.id]
        assert root["name"] == "invoke_agent toy"
        assert root["attributes"]["agentrig.step"] == each.step
        scores = [
            (name, e["gen_ai.evaluation.score.value"], e["gen_ai.evaluation.name"]) for name, _, e in root["events"]
        ]
        value = each.value
        assert scores == ([] if value is None else [("gen_ai.evaluation.result", value, "toy-parity")])
    assert {s["name"] for s in live.spans.values()} >= {"invoke_agent toy", "write_query", "chat toy-model"}
    assert "agent-error" in {root["attributes"].get("error.type") for root in roots.values()}
    assert "gold-" not in json.dumps(list(live.spans.values()))
    writes = json.loads((run / "summary.json").read_text())["observer_writes"]["otlp"]
    assert (writes["failed"], writes["dropped"], writes["unsent"], writes["written"]) == (0, 0, 0, live.requests)

    with receiving() as again:
        said = invoke("export-traces", str(run), "--otlp", again.url)
    assert said.startswith(f"sent the traces of {len(rollouts)} rollouts, {len(wanted)} spans, to http://")
    assert again.spans == live.spans
    invoke("export-traces", str(run), "--file", str(tmp_path / "traces.jsonl"))
    read: dict[str, Any] = {}
    for line in (tmp_path / "traces.jsonl").read_text().splitlines():
        request = ParseDict(base64_ids(json.loads(line)), ExportTraceServiceRequest())
        read |= {f"{span['trace']}/{span['id']}": span for span in spans_in(request)}
    ids = {
        key: [span["attributes"].pop(name, None) for name in (PROMPT_IDS, RESPONSE_IDS)] for key, span in read.items()
    }
    assert read == live.spans
    for key, (_, span) in wanted.items():
        recorded = [span.attributes.get(f"{part}_token_ids") for part in ("prompt", "response")]
        assert [found and json.loads(found) for found in ids[key]] == recorded
    assert any(all(found) for found in ids.values())


def base64_ids(value: Any) -> Any:
    """Return OTLP's JSON in protobuf's own form: its ids are hexadecimal."""
    if isinstance(value, dict):
        ids = ("traceId", "spanId", "parentSpanId")
        return {k: base64.b64encode(bytes.fromhex(v)).decode() if k in ids else base64_ids(v) for k, v in value.items()}
    return [base64_ids(v) for v in value] if isinstance(value, list) else value


def sql_rollout() -> Rollout:
    """Return a rollout with a node, a call that calls a tool, a failed call and a tool, as agents of LangGraph."""
    call = {"id": "c1", "type": "function", "function": {"name": "query", "arguments": '{"sql": "SELECT 1"}'}}
    messages = [
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "[[1]]"},
    ]
    tools = [{"type": "function", "function": {"name": "query"}}]
    request = {"model": "m", "temperature": 0.5, "max_tokens": 9, "tools": tools, "messages": messages}
    choices = [{"finish_reason": "stop", "message": {"role": "assistant", "content": "1"}}]
    answer = {"id": "x1", "model": "m-1", "choices": choices}
    asked = {"request": request, "response": answer, "prompt_token_ids": [1, 2, 3], "response_token_ids": [4]}
    used = {"tool.name": "query", "input": "SELECT 1", "output": [[1]], "gen_ai.prompt.0.role": "old"}
    root, node = "a" * 16, "b" * 32
    spans = (
        Span(id=root, parent=None, name="rollout", start=100.0, end=104.5),
        Span(id=node, parent=root, name="chain.chain", start=100.5, end=104.0, attributes={NODE: "write_query"}),
        Span(id="c" * 16, parent=node, name=LLM_CALL, start=101.0, end=102.0, attributes=asked),
        Span(id="d" * 16, parent=node, name=LLM_CALL, start=102.0, end=102.5, error="APIError: 500", attributes={}),
        Span(id="e" * 32, parent=node, name="tool", start=103.0, end=103.5, attributes=used),
    )
    score = attrs.evolve(Score.ok(0.5), details={"gold": "SELECT gold"})
    task = Task(id="t1", input={"question": "How many?"}, private={"sql": "SELECT gold"})
    made = rollout(score=score, answer="1", trace=Trace(rollout_id="r1", spans=spans))
    return attrs.evolve(made, id="r1", task=task, step=3)


def test_spans_have_the_names_of_the_conventions() -> None:
    """In the version that is named, and none of AgentOps; nothing that the agent must not see."""
    root, node, chat, failed, tool = spans_of(sql_rollout(), ORIGIN)
    assert [s.name for s in (root, node, chat, failed, tool)] == [
        *("invoke_agent sql", "write_query", "chat m", "chat", "execute_tool query"),
    ]
    assert [s.attributes.get("gen_ai.operation.name") for s in (root, chat, failed, tool)] == [
        *("invoke_agent", "chat", "chat", "execute_tool"),
    ]
    parents = [s.parent and s.parent.span_id for s in (root, node, chat, failed, tool)]
    assert parents == [None, root.context.span_id, *[node.context.span_id] * 3]
    assert {s.context.trace_id for s in (root, node, chat, failed, tool)} == {trace_id("r1")}
    assert (chat.start_time, chat.end_time, chat.kind.name) == (101_000_000_000, 102_000_000_000, "CLIENT")
    assert chat.attributes["gen_ai.usage.input_tokens"] == 3
    assert chat.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert chat.attributes["gen_ai.request.temperature"] == 0.5
    parts = [message["parts"][0] for message in json.loads(chat.attributes["gen_ai.input.messages"])]
    assert [part["type"] for part in parts] == ["text", "tool_call", "tool_call_response"]
    assert failed.attributes["error.type"] == "APIError"
    assert (failed.status.status_code.name, failed.status.description) == ("ERROR", "APIError: 500")
    assert tool.attributes["gen_ai.tool.call.result"] == "[[1]]"
    (event,) = root.events
    assert (event.name, event.timestamp) == ("gen_ai.evaluation.result", 104_500_000_000)
    assert event.attributes["gen_ai.evaluation.score.label"] == "incorrect"
    known = {value for value in vars(gen_ai_attributes).values() if isinstance(value, str)}
    used = {key for s in (root, node, chat, failed, tool) for key in s.attributes} | set(event.attributes)
    assert {key for key in used if key.startswith("gen_ai.")} <= known
    assert set(REQUEST.values()) <= known
    assert list(Schemas)[-1].value == SCHEMA
    everything = repr([(s.to_json(), s.events) for s in (root, node, chat, failed, tool)])
    assert "gold" not in everything
    bare = repr([s.to_json() for s in spans_of(sql_rollout(), attrs.evolve(ORIGIN, content=False))])
    assert "How many?" not in bare
    assert "SELECT 1" not in bare


def test_a_reward_that_the_agent_gave_is_sent_and_its_text_only_with_content() -> None:
    attributes = {REWARD: 0.5, FEEDBACK: "SELECT 1 was right"}
    given = Span(id="f" * 16, parent="a" * 16, name="reward", start=103.0, end=103.0, attributes=attributes)
    made = sql_rollout()
    made = attrs.evolve(made, trace=attrs.evolve(made.trace, spans=(*made.trace.spans, given)))
    sent = spans_of(made, ORIGIN)[-1]
    assert (sent.name, sent.attributes) == ("reward", attributes)
    bare = spans_of(made, attrs.evolve(ORIGIN, content=False))[-1]
    assert bare.attributes == {REWARD: 0.5}


def test_values_that_a_span_cannot_hold_are_text(caplog: pytest.LogCaptureFixture) -> None:
    request = {"model": "m\ud800", "seed": 10**30, "n": -(10**30), "top_k": 2**63 - 1}
    attributes = {"request": request, "response": {"choices": [{"finish_reason": "\ud800"}]}}
    whole = sql_rollout()
    spans = [attrs.evolve(s, attributes=attributes) if s.name == LLM_CALL else s for s in whole.trace.spans]
    found = exporting.json_line(spans_of(attrs.evolve(whole, trace=Trace(rollout_id=whole.id, spans=spans)), ORIGIN))
    assert not caplog.records
    sent = ParseDict(base64_ids(json.loads(found)), ExportTraceServiceRequest())
    seen = next(span for span in spans_in(sent) if span["name"].startswith("chat"))
    told = seen["attributes"]
    assert told["gen_ai.request.seed"] == str(10**30)
    assert told["gen_ai.request.choice.count"] == str(-(10**30))
    assert told["gen_ai.request.top_k"] == 2**63 - 1
    assert (seen["name"], told["gen_ai.request.model"]) == ("chat m\ufffd", "m\ufffd")


@pytest.mark.parametrize("kind", ["silent", "refusing", "absent"])
def test_a_collector_that_does_not_answer_holds_nothing_up(kind: str, tmp_path: Path) -> None:
    with receiving(status=400, holds=threading.Event() if kind == "silent" else None) as collector:
        url = "http://127.0.0.1:1" if kind == "absent" else collector.url
        sender = Otlp(OtlpConfig(url=url, timeout_s=0.2 if kind != "silent" else 60.0, queue=2, flush_s=0.5))
        sender.on_run_start(RunStart(directory=tmp_path, config={"agent": {"use": "a"}}, steps=1, first_step=1))
        start = time.process_time()
        for _ in range(200):
            sender.on_rollout_end(sql_rollout())
        assert time.process_time() - start < 2.0
        sender.on_run_end(RunEnd(directory=tmp_path, summary={}))
        counts = sender.settle()
    assert counts["written"] == 0
    assert counts["dropped"] + counts["failed"] + counts["unsent"] == 13  # requests of at most 16 rollouts
    if kind == "silent":
        assert (counts["unsent"], counts["dropped"]) == (3, 10)
    elif counts["failed"]:
        assert f"{url}/v1/traces did not take 256 spans" in counts["error"] or "spans: is an OTLP" in counts["error"]


def exported(run: Path, file: Path) -> Result:
    return CliRunner().invoke(main, ["export-traces", str(run), "--file", str(file)])


def test_a_run_without_its_manifest_is_exported_all_the_same(ended_run: Callable[..., Path], tmp_path: Path) -> None:
    run = ended_run("algorithm.steps=1", "algorithm.report=true")
    assert exported(run, tmp_path / "before.jsonl").exit_code == 0
    (run / "manifest.json").unlink()
    assert exported(run, tmp_path / "after.jsonl").exit_code == 0
    assert (tmp_path / "after.jsonl").read_text() == (tmp_path / "before.jsonl").read_text()
    file = run / "rollouts" / "train-00001.parquet"
    content = bytearray(file.read_bytes())
    content[8 : len(content) // 3] = b"\x55" * (len(content) // 3 - 8)  # pages, not the footer
    file.write_bytes(content)
    done = exported(run, tmp_path / "damaged.jsonl")
    assert (done.exit_code, type(done.exception)) == (1, SystemExit), done.exception
    assert "train-00001.parquet" in done.stderr
    shutil.rmtree(run / "rollouts")
    done = exported(run, tmp_path / "nothing.jsonl")
    assert done.exit_code == 1, done.output
    assert "has no rollouts to export" in done.stderr
    assert not (tmp_path / "nothing.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["export-traces", "{run}"], "say where the traces go: --otlp URL, or --file FILE"),
        (
            ["export-traces", "{run}", "--otlp", "http://h:4318", "--file", "x"],
            "the traces go to one place: give one of the two: --otlp URL, or --file FILE",
        ),
        (["export-traces", "{run}", "--otlp", "localhost:4318"], "is no address: write http://HOST:PORT/PATH"),
        (["export-traces", "{run}", "--otlp", "http://me:pw@h:4318"], "holds a login"),
        (["export-traces", "{run}/..", "--file", "x"], "is not a run directory"),
        (["train", "toy", "--otlp", "ftp://h"], "is no address: write http://HOST:PORT/PATH"),
    ],
)
def test_a_wrong_place_says_what_to_write(words: list[str], said: str, tmp_path: Path, toy_file: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "manifest.json").write_text("{}")
    filled = [word.replace("{run}", str(run)) for word in words]
    more = ["--plugin", toy_file] if words[0] == "train" else []
    done = CliRunner().invoke(main, [*filled, *more])
    assert done.exit_code == 1
    assert said in done.output


def test_a_file_that_cannot_be_written_whole_is_named_and_nothing_of_it_is_left(
    ended_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ended_run("algorithm.steps=1")
    done = exported(run, tmp_path / "none" / "traces.jsonl")
    assert (done.exit_code, type(done.exception)) == (1, SystemExit), done.exception
    assert "choose another place with another --file" in done.stderr

    def full(spans: object) -> str:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr("agentrig.otlp.exporting.json_line", full)
    done = exported(run, tmp_path / "traces.jsonl")
    assert (done.exit_code, type(done.exception)) == (1, SystemExit), done.exception
    assert f"{tmp_path / 'traces.jsonl'} cannot be written: [Errno 27] File too large" in done.stderr
    assert list(tmp_path.glob("*traces*")) == list(tmp_path.glob(".*traces*")) == []
