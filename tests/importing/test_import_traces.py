"""Traces of production and of runs as demonstrations: message for message, and token for token where ids are known."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner, Result
from rollouts import rollout

from agentrig.adapters import triplet_of
from agentrig.cli.entry import main
from agentrig.demonstrations import Turn, read_demonstrations
from agentrig.otlp.exporting import json_line
from agentrig.otlp.spans import Origin, spans_of
from agentrig.rollouts import Rollout
from agentrig.run.rows import stored_rollouts
from agentrig.tasks import Task
from agentrig.testing.recorded import recorded_traces
from agentrig.traces import LLM_CALL, SERVER, Span, Trace


def ran(*words: Any) -> Result:
    done = CliRunner().invoke(main, ["import-traces", *map(str, words)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done


def imported(tmp_path: Path, *words: Any) -> tuple[list[Turn], dict[str, Any]]:
    """Return the demonstrations, and the counts that are printed."""
    out = tmp_path / "demonstrations.jsonl"
    out.unlink(missing_ok=True)
    done = ran(*words, "--out", out, "--json")
    assert done.exit_code == 0, done.output
    counts = json.loads(done.output)
    turns = read_demonstrations(out)
    assert counts["demonstrations"] == len(turns)
    assert counts["calls"] == len(turns) + counts["duplicates"] + sum(counts["left_out"].values())
    return turns, counts


def saved(tmp_path: Path, *values: Any) -> Path:
    file = tmp_path / "traces.jsonl"
    file.write_text("".join((value if isinstance(value, str) else json.dumps(value)) + "\n" for value in values))
    return file


def text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def plain(turn: Turn) -> list[dict[str, Any]]:
    """Return the messages with the reply, as OpenAI has them; arguments of tools as objects, whose JSON may vary."""
    messages = json.loads(json.dumps([*turn.messages, turn.reply.message()]))
    for message in messages:
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return messages


# --- runs of agentrig


def rollout_of(name: str, spans: Sequence[Span]) -> Rollout:
    task = Task(id=f"task-{name}", input={"question": "How many?"})
    return attrs.evolve(rollout(trace=Trace(rollout_id=name, spans=spans)), id=name, task=task)


def test_recorded_traces_come_back_token_for_token(tmp_path: Path) -> None:
    """Five frameworks: tools, streams, calls at once, a busy server, a broken stream, another server."""
    rollouts = [rollout_of(name, trace.spans) for name, trace in recorded_traces().items()]
    origin = Origin(run="r", agent="a", reward="exact", whole=True)
    file = saved(tmp_path, *(json_line(spans_of(each, origin)) for each in rollouts))
    turns, counts = imported(tmp_path, file)
    wanted = {}
    for each in rollouts:
        for call in each.trace.llm_calls():
            request, response = call.attributes["request"], call.attributes["response"]
            triplet = triplet_of(call)
            assert (triplet is None) == (SERVER in call.attributes)
            prompt = [{"content": None, **message} for message in request["messages"]]  # one framework leaves it out
            key = text([prompt, response["choices"][0]["message"], request.get("tools") or []])
            ids = triplet and (list(triplet.prompt_ids), list(triplet.response_ids))
            wanted.setdefault(key, (each.task.id, ids))
    found = {
        text([list(turn.messages), turn.reply.message(), list(turn.tools)]): (
            turn.task,
            (turn.prompt_token_ids, turn.response_token_ids) if turn.prompt_token_ids else None,
        )
        for turn in turns
    }
    assert found == wanted
    assert len(found) > 8
    assert counts["left_out"] == {"the call failed": 1, "its stream was cut short": 1}
    assert {turn.reward for turn in turns} == {1.0}


def test_a_file_has_long_texts_whole(tmp_path: Path) -> None:
    request = {"messages": [{"role": "user", "content": "long " * 10_000}], "model": "m"}
    response = {"choices": [{"message": ANSWER, "finish_reason": "stop"}]}
    root = Span(id="a" * 16, parent=None, name="rollout", start=1.0, end=2.0)
    attributes = {"request": request, "response": response}
    call = Span(id="b" * 16, parent=root.id, name=LLM_CALL, start=1.0, end=2.0, attributes=attributes)
    for whole, said in ((True, "1 call -> 1 demonstration, 0 with"), (False, "1 its content is no JSON: a limit of")):
        origin = Origin(run="r", agent="a", reward="exact", whole=whole)
        file = saved(tmp_path, json_line(spans_of(rollout_of("long", [root, call]), origin)))
        assert said in ran(file, "--out", tmp_path / f"{whole}.jsonl").output
    (turn,) = read_demonstrations(tmp_path / "True.jsonl")
    assert (turn.messages, turn.reply.content) == (request["messages"], ANSWER["content"])


def test_a_run_and_its_export_give_the_same_exact_demonstrations(
    ended_run: Callable[..., Path], tmp_path: Path
) -> None:
    run, file = ended_run(), tmp_path / "traces.jsonl"
    assert CliRunner().invoke(main, ["export-traces", str(run), "--file", str(file)]).exit_code == 0
    rollouts = [r for batch in stored_rollouts(run / "rollouts", size=16) for r in batch]
    for words, accepted in (
        ([], lambda r: r.correct),
        (["--min-reward", "0"], lambda r: True),
        (["--min-reward", "0.5"], lambda r: r.value >= 0.5),
    ):
        wanted = {
            (tuple(call.attributes["prompt_token_ids"]), tuple(call.attributes["response_token_ids"]))
            for r in rollouts
            if r.mode == "train" and not r.failure and accepted(r)
            for call in r.trace.llm_calls()
        }
        assert wanted
        both = [imported(tmp_path, source, *words) for source in (run, file)]
        for turns, _ in both:
            assert {(tuple(t.prompt_token_ids), tuple(t.response_token_ids)) for t in turns} == wanted
        assert both[0][1]["left_out"] == both[1][1]["left_out"]
        assert [(t.messages, t.reply, t.reward, t.task) for t in both[0][0]] == [
            (t.messages, t.reply, t.reward, t.task) for t in both[1][0]
        ]
        assert both[0][1]["left_out"]["its rollout measures on held-out tasks"] == sum(
            len(r.trace.llm_calls()) for r in rollouts if r.mode != "train"
        )


def test_calls_that_the_run_does_not_train_are_left_out(ended_run: Callable[..., Path], tmp_path: Path) -> None:
    run = ended_run('tasks.do=["raise", "", ""]', "run.failure_limit=1")
    import pyarrow as pa
    import pyarrow.parquet as pq

    good = next(r for b in stored_rollouts(run / "rollouts", size=16) for r in b if r.mode == "train" and r.correct)
    before, counts = imported(tmp_path, run)
    assert counts["left_out"].keys() >= {"its rollout was judged incorrect"}
    (run / "calls").mkdir(exist_ok=True)
    rows = [
        {"rollout": r.id, "span": c.id, "reason": "unmatched-node", "place": "dropped"}
        for b in stored_rollouts(run / "rollouts", size=16)
        for r in b
        if r.task.id == good.task.id and r.mode == "train"
        for c in r.trace.llm_calls()
    ]
    for step in {good.step, 1, 2}:
        pq.write_table(pa.Table.from_pylist(rows), run / "calls" / f"train-{step:05d}.parquet")
    after, counts = imported(tmp_path, run)
    assert [t for t in before if t.task != good.task.id] == after
    assert counts["left_out"]["the run does not train it: the adapter trains other graph nodes"] > 0
    (run / "calls" / "train-00001.parquet").write_bytes(b"broken")
    done = ran(run, "--out", tmp_path / "x.jsonl")
    assert (done.exit_code, "calls/train-00001.parquet is damaged" in done.output) == (1, True)


# --- conversations that a script makes

WORDS = ("two", "Köln", "日本", "a\nb", '"quoted"', "🦜", "\\", "  ")


def conversation(rng: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return messages and tools: questions, tool calls, some of them two at once, their answers, and replies."""

    def text() -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, 6))) + str(rng.random())

    names = [f"tool_{i}" for i in range(rng.randint(0, 3))]
    tools = [{"type": "function", "function": {"name": n, "parameters": {"type": "object"}}} for n in names]
    messages = [{"role": "system", "content": text()}] if rng.random() < 0.7 else []
    for _ in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": text()})
        while names and rng.random() < 0.6:
            calls = [
                {
                    "id": f"call-{rng.randrange(10**9)}",
                    "type": "function",
                    "function": {
                        "name": rng.choice(names),
                        "arguments": json.dumps({"q": text(), "n": [rng.random(), None, {"deep": True}]}),
                    },
                }
                for _ in range(rng.randint(1, 2))
            ]
            said: dict[str, Any] = {"role": "assistant", "content": text() if rng.random() < 0.3 else None}
            if rng.random() < 0.3:
                said["reasoning_content"] = text()
            messages.append({**said, "tool_calls": calls})
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": text()} for call in calls]
        messages.append({"role": "assistant", "content": text()})
    return messages, tools


def atif_of(messages: list[dict[str, Any]], tools: list[dict[str, Any]], number: int) -> dict[str, Any]:
    """Return a trajectory of the same conversation; each call of a model has token ids."""
    steps: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            result = {"source_call_id": message["tool_call_id"], "content": message["content"]}
            steps[-1].setdefault("observation", {"results": []})["results"].append(result)
            continue
        source = {"system": "system", "user": "user", "assistant": "agent"}[message["role"]]
        step = {"step_id": len(steps) + 1, "source": source, "message": message["content"] or ""}
        if source == "agent":
            step["metrics"] = {"prompt_token_ids": [number, len(steps)], "completion_token_ids": [len(steps)]}
        if "reasoning_content" in message:
            step["reasoning_content"] = message["reasoning_content"]
        if "tool_calls" in message:
            step["tool_calls"] = [
                {
                    "tool_call_id": call["id"],
                    "function_name": call["function"]["name"],
                    "arguments": json.loads(call["function"]["arguments"]),
                }
                for call in message["tool_calls"]
            ]
        steps.append(step)
    agent = {"name": "a", "version": "1", "model_name": "m", "tool_definitions": tools}
    return {
        "schema_version": "ATIF-v1.7",
        "session_id": str(number),
        "agent": agent,
        "steps": steps,
        "extra": {"reward": number % 2},
    }


@pytest.mark.parametrize("form", ["chat", "atif"])
def test_100_records_come_back_message_for_message(form: str, tmp_path: Path) -> None:
    rng = random.Random(form)
    made = [conversation(rng) for _ in range(100)]
    wanted = [
        ([*messages[: i + 1]], tools, number)
        for number, (messages, tools) in enumerate(made)
        for i, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    records = [
        {"messages": messages, "tools": tools, "reward": number % 2}
        if form == "chat"
        else atif_of(messages, tools, number)
        for number, (messages, tools) in enumerate(made)
    ]
    turns, counts = imported(tmp_path, saved(tmp_path, *records))
    assert len(wanted) > 300
    for turn, (messages, tools, number) in zip(turns, wanted, strict=True):
        objects = json.loads(json.dumps(messages))
        for message in objects:
            for call in message.get("tool_calls") or ():
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        assert plain(turn) == objects
        assert (list(turn.tools), turn.reward) == (tools, number % 2)
        assert turn.source.startswith(f"{tmp_path}/traces.jsonl, line {number + 1}, ")
    assert counts["with_token_ids"] == (0 if form == "chat" else len(wanted))
    if form == "atif":
        steps = [r["steps"] for r in records]
        ids = [
            (s["metrics"]["prompt_token_ids"], s["metrics"]["completion_token_ids"])
            for found in steps
            for s in found
            if s["source"] == "agent"
        ]
        assert [(t.prompt_token_ids, t.response_token_ids) for t in turns] == ids
        assert {t.tokenizer for t in turns} == {"m"}
    better, counts = imported(tmp_path, tmp_path / "traces.jsonl", "--min-reward", "1")
    assert better == [turn for turn in turns if turn.reward == 1]
    assert counts["left_out"] == {"its reward is below 1": len(turns) - len(better)}


# --- OpenTelemetry of other programs


def any_value(value: Any) -> dict[str, Any]:
    """Return plain data as OTLP's JSON has it."""
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [any_value(v) for v in value]}}
    if isinstance(value, dict):
        return {"kvlistValue": {"values": attributes(value)}}
    return {"stringValue": value}


def attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": any_value(value)} for key, value in values.items()]


def span(name: str = "chat m", trace: str = "a", **more: Any) -> dict[str, Any]:
    values = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m", **more.pop("values", {})}
    return {"traceId": trace * 32, "spanId": "b" * 16, "name": name, "attributes": attributes(values), **more}


def spans(*found: dict[str, Any]) -> dict[str, Any]:
    return {"resourceSpans": [{"scopeSpans": [{"spans": list(found)}]}]}


def logs(*found: dict[str, Any]) -> dict[str, Any]:
    return {"resourceLogs": [{"scopeLogs": [{"logRecords": list(found)}]}]}


ARGUMENTS = {"city": "Köln", "days": 2}
CALLED = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)}}
CONVERSATION: Any = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
]
ANSWER: Any = {"role": "assistant", "content": "It rains."}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}

PARTS: Any = [
    {"role": "user", "parts": [{"type": "text", "content": "Weather?"}]},
    {"role": "assistant", "parts": [{"type": "tool_call", "id": "c1", "name": "weather", "arguments": ARGUMENTS}]},
    {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "rain"}]},
]
SAID: Any = [{"role": "assistant", "parts": [{"type": "text", "content": "It rains."}], "finish_reason": "stop"}]
CONTENT: Any = {
    "gen_ai.system_instructions": [{"type": "text", "content": "Be short."}],
    "gen_ai.input.messages": PARTS,
    "gen_ai.output.messages": SAID,
    "gen_ai.tool.definitions": [{"type": "function", "name": "weather", "parameters": {"type": "object"}}],
}
TEXTS = {key: json.dumps(value) for key, value in CONTENT.items()}
FLAT: Any = {
    "gen_ai.prompt.0.role": "system", "gen_ai.prompt.0.content": "Be short.",
    "gen_ai.prompt.1.role": "user", "gen_ai.prompt.1.content": "Weather?",
    "gen_ai.prompt.2.role": "assistant", "gen_ai.prompt.2.content": None,
    "gen_ai.prompt.2.tool_calls.0.id": "c1", "gen_ai.prompt.2.tool_calls.0.name": "weather",
    "gen_ai.prompt.2.tool_calls.0.arguments": json.dumps(ARGUMENTS),
    "gen_ai.prompt.3.role": "tool", "gen_ai.prompt.3.content": "rain", "gen_ai.prompt.3.tool_call_id": "c1",
    "gen_ai.request.functions.0.name": "weather", "gen_ai.request.functions.0.parameters": '{"type": "object"}',
    "gen_ai.completion.0.role": "assistant", "gen_ai.completion.0.content": "It rains.",
    "gen_ai.completion.0.finish_reason": "stop",
}  # fmt: skip
BODIES: Any = [
    ("gen_ai.system.message", {"content": "Be short."}),
    ("gen_ai.user.message", {"content": "Weather?"}),
    ("gen_ai.assistant.message", {"tool_calls": [CALLED]}),
    ("gen_ai.tool.message", {"id": "c1", "content": "rain"}),
    ("gen_ai.choice", {"index": 0, "finish_reason": "stop", "message": ANSWER}),
]
WITH_TOOLS = {"gen_ai.tool.definitions": TEXTS["gen_ai.tool.definitions"]}
DETAILS = {"name": "gen_ai.client.inference.operation.details", "attributes": attributes(CONTENT)}
IDS = {"traceId": "a" * 32, "spanId": "b" * 16}

EVENTS: Any = [
    {"name": name, "timeUnixNano": str(i), "attributes": attributes({"gen_ai.event.content": json.dumps(body)})}
    for i, (name, body) in enumerate(BODIES)
]

FORMS: Any = {
    "attributes, as JSON": [spans(span(values=TEXTS))],
    "attributes, as values": [spans(span(values=CONTENT))],
    "numbered attributes": [spans(span(values={k: v for k, v in FLAT.items() if v is not None}))],
    "an event of the span": [spans(span(events=[DETAILS]))],
    "a log record before its span": [logs({**DETAILS, **IDS}), spans(span())],
    "a log record alone": [
        logs(
            {
                **IDS,
                "eventName": DETAILS["name"],
                "attributes": attributes({"gen_ai.operation.name": "chat", **CONTENT}),
            }
        )
    ],
    "one event a message": [spans(span(values=WITH_TOOLS, events=EVENTS))],
    "one log record a message, in any order": [
        spans(span(values=WITH_TOOLS)),
        logs(
            *(
                {**IDS, "timeUnixNano": str(i), "attributes": attributes({"event.name": name}), "body": any_value(body)}
                for i, (name, body) in reversed(list(enumerate(BODIES)))
            )
        ),
    ],
    "one span a line": [span(values=TEXTS)],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("whole", [False, True])
def test_each_form_of_spans_is_read(form: str, whole: bool, tmp_path: Path) -> None:
    file = saved(tmp_path, *FORMS[form])
    if whole:  # one document, with line breaks
        file = tmp_path / "traces.json"
        file.write_text(json.dumps(FORMS[form][0] if len(FORMS[form]) == 1 else FORMS[form], indent=1))
    (turn,), counts = imported(tmp_path, file)
    assert plain(turn) == json.loads(
        json.dumps([*CONVERSATION, ANSWER]).replace(json.dumps(CALLED["function"]["arguments"]), json.dumps(ARGUMENTS))
    )
    assert list(turn.tools) == [TOOL]
    assert counts["left_out"] == {}


def test_spans_and_log_records_without_ids_are_calls_of_their_own(tmp_path: Path) -> None:
    others = [{**CONTENT, "gen_ai.output.messages": [{"parts": [{"type": "text", "content": c}]}]} for c in "abcd"]
    bare = [{"name": "chat", "attributes": attributes(values)} for values in others[:2]]
    details = [{"eventName": DETAILS["name"], "attributes": attributes(values)} for values in others[2:]]
    turns, counts = imported(tmp_path, saved(tmp_path, spans(*bare), logs(*details)))
    assert ([turn.reply.content for turn in turns], counts["left_out"]) == (["a", "b", "c", "d"], {})


def test_an_evaluation_anywhere_in_a_trace_is_the_reward(tmp_path: Path) -> None:
    scored = {"name": "gen_ai.evaluation.result", "attributes": attributes({"gen_ai.evaluation.score.value": 0.25})}
    other = attributes({"gen_ai.evaluation.score.value": 1, "gen_ai.evaluation.score.label": "fail"})
    root = {"traceId": "a" * 32, "spanId": "c" * 16, "name": "POST /ask", "attributes": []}
    call = span(values=TEXTS, parentSpanId="c" * 16)
    file = saved(tmp_path, spans(call), spans({**root, "events": [scored]}))
    assert imported(tmp_path, file)[0][0].reward == 0.25
    file = saved(tmp_path, spans(call), spans(root), logs({**IDS, **scored, "attributes": other}))
    done = ran(file, "--out", tmp_path / "x.jsonl")
    assert (done.exit_code, "1 its rollout was judged incorrect" in done.output) == (1, True)
    assert imported(tmp_path, file, "--min-reward", "1")[0][0].reward == 1
    file = saved(tmp_path, spans(call), spans({**root, "status": {"code": 2, "message": "HTTP 500"}}))
    assert "1 its rollout failed" in ran(file, "--out", tmp_path / "x.jsonl").output


def replied(*, asked: Any = PARTS, **reply: Any) -> dict[str, Any]:
    """Return a span of a chat whose reply differs in some fields from the usual one."""
    messages = {"gen_ai.input.messages": asked, "gen_ai.output.messages": [{**SAID[0], **reply}]}
    return span(values={**CONTENT, **messages})


LEFT_OUT: Any = {
    "the call failed": [span(values={"error.type": "timeout"}), span(status={"code": 2, "message": "HTTP 503"})],
    "its stream was cut short": [
        span(values=CONTENT, status={"code": "STATUS_CODE_ERROR"}),
        replied(finish_reason="error"),
        span(
            values={**CONTENT, "gen_ai.request.stream": True, "gen_ai.output.messages": [{"parts": SAID[0]["parts"]}]}
        ),
    ],
    "it is an embedding, not a chat": [span(values={"gen_ai.operation.name": "embeddings"})],
    "it is a completion of a text, not a chat": [span(values={"gen_ai.operation.name": "text_completion"})],
    "its messages are not recorded": [span(), span(values={"gen_ai.input.messages": PARTS})],
    "the reply was cut at its token limit": [
        replied(finish_reason="length"),
        span(values={**{k: v for k, v in FLAT.items() if v}, "gen_ai.completion.0.finish_reason": "length"}),
    ],
    "a content filter ended the reply": [replied(finish_reason="content_filter")],
    "its content is no JSON: a limit of attributes has cut it": [
        span(values={**TEXTS, "gen_ai.input.messages": TEXTS["gen_ai.input.messages"][:50]})
    ],
    "a part of a message is no text": [replied(asked=[{"role": "user", "parts": [{"type": "uri", "uri": "x"}]}])],
    "the reply is empty": [replied(parts=[])],
    "the arguments of the reply's tool call are no JSON object": [
        replied(parts=[{"type": "tool_call", "name": "f", "arguments": "{a"}])
    ],
}


def test_what_can_not_be_learned_is_counted_by_reason(tmp_path: Path) -> None:
    choices = [*SAID, {**SAID[0], "parts": [{"type": "text", "content": "Dry."}]}]
    good = span(values={**CONTENT, "gen_ai.output.messages": choices})
    tool = span("execute_tool f", values={"gen_ai.operation.name": "execute_tool", **CONTENT})
    agent = span("invoke_agent a", values={"gen_ai.operation.name": "invoke_agent", **CONTENT})
    web = {"traceId": "1" * 32, "spanId": "2" * 16, "name": "GET /", "attributes": attributes({"http.route": "/"})}
    found = [good, good, tool, agent, web, *(s for group in LEFT_OUT.values() for s in group)]
    numbered = [{**s, "spanId": f"{i:016x}", "traceId": f"{i:032x}"} for i, s in enumerate(found)]
    chats = [
        {"messages": [*CONVERSATION, {**ANSWER, "weight": 0}]},
        {"messages": [{"role": "user", "content": "?"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, ANSWER]},
        {"messages": [ANSWER, {"role": "user", "content": "\ud800"}, ANSWER]},
        {"prompt": "a", "completion": "b"},
        7,
        '{"messages": [{"role": "us',
    ]
    step = {"source": "agent", "message": "b"}
    trajectory: Any = {
        "steps": [
            {"source": "user", "message": "a"},
            {**step, "is_copied_context": True},
            {**step, "llm_call_count": 3},
            {**step, "message": [{"type": "image", "source": {}}]},
        ],
        "subagent_trajectories": [{"steps": [step]}],
    }
    file = saved(tmp_path, spans(*numbered), trajectory, *chats)
    turns, counts = imported(tmp_path, file)
    assert len(turns) == 2  # the good span, and the first call of the conversation whose last message has no weight
    assert counts["duplicates"] == 1
    wanted = {reason: len(group) for reason, group in LEFT_OUT.items()}
    more = {
        "it is a further choice of one call": 2,
        'the reply has "weight": 0, so nothing is learned of it': 1,
        "no message is the assistant's": 1,
        "a part of a message is no text": 3,
        "no message comes before the reply": 2,
        "it holds half of a UTF-16 character": 1,
        "it is not OTLP, ATIF or a chat": 2,
        "it is no JSON": 1,
        "the step is copied from an earlier trajectory": 1,
        "the step is not one call of a model": 1,
    }
    assert counts["left_out"] == {**wanted, **more}
    done = ran(file, "--out", tmp_path / "again.jsonl")
    lines = done.output.splitlines()
    assert lines[0] == f"{counts['calls']} calls -> 2 demonstrations, 0 with exact token ids -> {tmp_path}/again.jsonl"
    assert lines[1:3] == ["1 duplicate", f"{sum(counts['left_out'].values())} left out:"]
    place = f"{file}, line 1, span "
    assert any(f"2 the call failed ({place}" in line and "timeout" in line for line in lines)
    (line,) = (line for line in lines if f"1 it is no JSON ({file}, line 9: " in line)
    assert line.count(str(file)) == line.count("no JSON") == 1


def damaged(value: Any, rng: random.Random, share: float) -> Any:
    """Return plain data in which some parts are of another type."""
    if rng.random() < share:
        return rng.choice([None, True, -1, 0.5, "", "text", "{", [], [[]], [None], {}, {"a": {}}, [7, "x"]])
    if isinstance(value, dict):
        return {key: damaged(inner, rng, share) for key, inner in value.items()}
    return [damaged(inner, rng, share) for inner in value] if isinstance(value, list) else value


def test_no_record_is_too_odd_to_be_counted(tmp_path: Path) -> None:
    rng = random.Random(0)
    forms = [*(value for values in FORMS.values() for value in values), {"messages": [*CONVERSATION, ANSWER]}]
    forms.append(atif_of([*CONVERSATION, ANSWER], [TOOL], 1))
    forms.append(spans(*(s for group in LEFT_OUT.values() for s in group)))
    records = [damaged(rng.choice(forms), rng, rng.choice([0.01, 0.03, 0.1])) for _ in range(1500)]
    text = [json.dumps(r).replace("b" * 16, f"{i:016x}").replace("a" * 32, f"{i:032x}") for i, r in enumerate(records)]
    turns, counts = imported(tmp_path, saved(tmp_path, *text))
    assert len(turns) > 50
    assert len(counts["left_out"]) > 12


def test_what_is_malformed_is_counted_and_named(tmp_path: Path) -> None:
    named = {"traceId": "a" * 32, "spanId": "b" * 16, "name": "chat"}
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    odd = [
        {"resourceSpans": "nope"},
        {"resourceSpans": [{"scopeSpans": [7]}]},
        spans({**named, "attributes": "nope"}),
        {"resourceLogs": [{"scopeLogs": {"logRecords": []}}]},
    ]
    said = ("resourceSpans is no list", "scopeSpans has an item that is no object", "attributes is no", "scopeLogs")
    for value, why in zip(odd, said, strict=True):
        done = ran(saved(tmp_path, good, value), "--out", tmp_path / f"{why}.jsonl")
        assert done.exit_code == 0, done.output
        (line,) = (line for line in done.output.splitlines() if "1 it is malformed OTLP" in line)
        assert "traces.jsonl, line 2" in line
        assert why in line
    _, counts = imported(tmp_path, saved(tmp_path, good, *odd, {"messages": "text"}))
    assert counts["left_out"] == {"it is malformed OTLP": 4, "its messages are no list": 1}


def test_a_least_reward_that_is_no_number_is_refused_in_plain_words(tmp_path: Path) -> None:
    done = ran(saved(tmp_path, {}), "--out", tmp_path / "x.jsonl", "--min-reward", "abc")
    assert (done.exit_code, "'abc' is no number." in done.output) == (2, True), done.output


def test_ids_of_tool_calls_do_not_make_a_conversation_another(tmp_path: Path) -> None:
    text = json.dumps({"messages": [*CONVERSATION, ANSWER]})
    turns, counts = imported(tmp_path, saved(tmp_path, text, text.replace('"c1"', '"c2"'), text.replace("rain", "sun")))
    assert (len(turns), counts["duplicates"]) == (3, 3)
    exact = {"messages": [*CONVERSATION, ANSWER], "prompt_token_ids": [1, 2], "response_token_ids": [3]}
    turns, counts = imported(tmp_path, saved(tmp_path, text, exact))
    assert ([turn.prompt_token_ids for turn in turns], counts["with_token_ids"]) == ([(), [1, 2]], 1)


@pytest.mark.parametrize(
    ("content", "words", "said"),
    [
        ("", [], "traces.jsonl is empty"),
        ("question,answer\na,b\n", [], "traces.jsonl, line 1 is no JSON"),
        ("{\n", [], "traces.jsonl, line 1 is no JSON"),
        ("\x1f\x8b", [], "is no JSON"),
        ('{"a": 1}\n{"b": 2}\n', [], "2 it is not OTLP, ATIF or a chat"),
        ('{"resourceSpans": []}', [], "there is none: are these spans of generative AI"),
        ('{"messages": []}', ["--format", "otlp"], "1 it is not otlp"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
            ["--min-reward", "1"],
            "1 no reward is recorded",
        ),
        ("{}", ["--out", "demonstrations.json"], "name it demonstrations.jsonl"),
        ("{}", ["--out", "{here}/traces.jsonl"], "traces.jsonl exists already: name another file"),
    ],
)
def test_nothing_usable_is_an_error(content: str, words: list[str], said: str, tmp_path: Path) -> None:
    file = tmp_path / "traces.jsonl"
    file.write_text(content)
    out = [] if "--out" in words else ["--out", tmp_path / "out.jsonl"]
    done = ran(file, *(word.replace("{here}", str(tmp_path)) for word in words), *out)
    assert done.exit_code == 1, done.output
    assert said in done.output
    assert sorted(f.name for f in tmp_path.iterdir()) == ["traces.jsonl"]


def test_a_folder_that_is_no_run_is_an_error(tmp_path: Path) -> None:
    done = ran(tmp_path, "--out", tmp_path / "x.jsonl")
    assert (done.exit_code, "is not a run directory" in done.output) == (1, True)
    assert ran(tmp_path / "nothing.jsonl", "--out", tmp_path / "x.jsonl").exit_code == 2


def test_a_line_of_another_encoding_is_left_out_and_the_others_are_kept(tmp_path: Path) -> None:
    line = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}).encode()
    (tmp_path / "mixed.jsonl").write_bytes(
        b"\n".join([line, line.replace(b'"b"', b'"\xff"'), line.replace(b'"b"', b'"c"')])
    )
    done = CliRunner().invoke(
        main, ["import-traces", str(tmp_path / "mixed.jsonl"), "--out", str(tmp_path / "out.jsonl")]
    )
    assert done.exit_code == 0, done.output
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2
    said = " ".join(done.output.split())
    assert "1 it is no JSON (" in said
    assert "the byte 0xff is not UTF-8" in said
