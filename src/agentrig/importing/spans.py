"""Calls of models in OpenTelemetry's JSON (OTLP): spans of the conventions for generative AI, and their log records.

Three forms of messages are read: attributes (`gen_ai.input.messages`), the same attributes of an event
`gen_ai.client.inference.operation.details`, and one event a message (`gen_ai.user.message`, `gen_ai.choice`), which
the conventions had until 1.36. So are the numbered attributes of OpenLLMetry and AgentOps (`gen_ai.prompt.0.role`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from agentrig.demonstrations import TOKENS, Unfit
from agentrig.figures import number
from agentrig.importing.calls import Found, line_of, rollout_fault
from agentrig.otlp.spans import PROMPT_IDS, RESPONSE_IDS
from agentrig.traces import items, mapping
from agentrig.tracing.gen_ai import request_of, response_of

CHAT = ("chat", "generate_content")
EMBEDDINGS = ("embeddings", "embedding")
COMPLETIONS = ("text_completion", "completion")
"""What an operation is called."""

DETAILS, EVALUATION = "gen_ai.client.inference.operation.details", "gen_ai.evaluation.result"
CHOICE = "gen_ai.choice"
MESSAGES = {f"gen_ai.{role}.message": role for role in ("system", "user", "assistant", "tool")}
"""Names of events."""

WRONG = ("incorrect", "fail")
"""Labels of an evaluation that keep a call out."""


@attrs.define
class Event:
    """An event of a span, or a log record.

    Attributes:
        time: Unix time in nanoseconds.
        body: What a message's event says.
    """

    name: str
    time: int
    values: Mapping[str, Any]
    body: Mapping[str, Any]


@attrs.define
class Recorded:
    """A span, or the log records of one that is not there.

    Attributes:
        place: Where it was found, for messages.
        root: Whether it has no parent.
        error: What went wrong, or None.
    """

    place: str
    trace: str
    values: dict[str, Any] = attrs.field(factory=dict)
    events: list[Event] = attrs.field(factory=list)
    root: bool = False
    error: str | None = None


class Spans:
    """Collects the spans and log records of all files, because those of one call may lie apart."""

    def __init__(self) -> None:
        self._spans: dict[tuple[str, str], Recorded] = {}
        self._logs: dict[tuple[str, str], Recorded] = {}
        self._malformed: list[Found] = []

    def add(self, value: Mapping[str, Any], place: str) -> None:
        """Add an export of spans or of log records, or one span."""
        for span in self._objects(value, place, "resourceSpans", "scopeSpans", "spans"):
            self._span(span, place)
        for record in self._objects(value, place, "resourceLogs", "scopeLogs", "logRecords"):
            self._log(record, place)
        if "spanId" in value:
            self._span(value, place)

    def _objects(self, record: Mapping[str, Any], place: str, key: str, *inner: str) -> Iterator[Mapping[str, Any]]:
        """Yield the objects in a list of a record, or in the lists of these; what has another form is left out."""
        held = record.get(key)
        if held is not None and not isinstance(held, list):
            self._leave_out(place, f"{key} is no list", held)
        for one in items(held):
            if not isinstance(one, Mapping):
                self._leave_out(place, f"{key} has an item that is no object", one)
            elif inner:
                yield from self._objects(one, place, *inner)
            else:
                yield one

    def _leave_out(self, place: str, why: str, value: Any) -> None:
        detail = f"{why}: {json.dumps(value, ensure_ascii=False):.80}"
        self._malformed.append((place, Unfit("it is malformed OTLP", detail)))

    def _check_attributes(self, record: Mapping[str, Any], place: str) -> None:
        if not isinstance(record.get("attributes"), Mapping):  # agentrig's own spans have a plain object
            list(self._objects(record, place, "attributes"))

    def _span(self, span: Mapping[str, Any], place: str) -> None:
        key = self._key(span)
        place = f"{place}, span {key[1]}"
        self._check_attributes(span, place)
        events = list(self._objects(span, place, "events"))
        for event in events:
            self._check_attributes(event, place)
        status, values = mapping(span.get("status")), _values(span.get("attributes"))
        failed = status.get("code") in (2, "STATUS_CODE_ERROR") or "error.type" in values
        self._spans[key] = Recorded(
            place=place,
            trace=key[0],
            values=values,
            events=[_event(event) for event in events],
            root=not span.get("parentSpanId"),
            error=str(status.get("message") or values.get("error.type") or "") if failed else None,
        )

    def _log(self, record: Mapping[str, Any], place: str) -> None:
        key = self._key(record)
        self._check_attributes(record, f"{place}, log records of span {key[1]}")
        found = self._logs.setdefault(key, Recorded(f"{place}, log records of span {key[1]}", key[0]))
        found.events.append(_event(record))

    def _key(self, record: Mapping[str, Any]) -> tuple[str, str]:
        """Return the ids of the trace and of the span; new ones for what has none."""
        new = f"#{len(self._spans) + len(self._logs)}"
        return str(record.get("traceId") or new), str(record.get("spanId") or new)

    def calls(self, *, judged: bool) -> Iterator[Found]:
        """Yield the calls of models among all that was added, in its order, and what is malformed; to be called once.

        If they are `judged`, calls that an evaluation labels as wrong are left out.
        """
        yield from self._malformed
        for key, logs in self._logs.items():
            self._spans.setdefault(key, attrs.evolve(logs, events=[])).events.extend(logs.events)
        roots: dict[str, Recorded] = {}
        scores: dict[str, list[Event]] = {}
        for span in self._spans.values():
            if span.root:
                roots.setdefault(span.trace, span)
            scores.setdefault(span.trace, []).extend(e for e in span.events if e.name == EVALUATION)
        for span in self._spans.values():
            span.events.sort(key=lambda event: event.time)
            for event in span.events:
                if event.name == DETAILS:
                    span.values = {**event.values, **span.values}
            operation = _operation(span)
            if operation in EMBEDDINGS:
                yield span.place, Unfit("it is an embedding, not a chat")
            elif operation in COMPLETIONS:
                yield span.place, Unfit("it is a completion of a text, not a chat")
            elif operation in CHAT:
                told = [event for event in span.events if event.name == EVALUATION] or scores[span.trace]
                yield from _call(span, roots.get(span.trace), told, judged)


def _operation(span: Recorded) -> Any:
    values = span.values
    stated = values.get("gen_ai.operation.name") or values.get("gen_ai.request.type") or values.get("llm.request.type")
    if stated is None and (
        "gen_ai.prompt.0.role" in values
        or "gen_ai.input.messages" in values
        or any(event.name in (*MESSAGES, CHOICE) for event in span.events)
    ):
        return "chat"
    return stated


def _call(span: Recorded, root: Recorded | None, scores: Sequence[Event], judged: bool) -> Iterator[Found]:
    """Yield a call; its other choices are left out."""
    values = span.values
    rollout = root.values if root else {}
    rewards = [r for e in scores if (r := number(e.values.get("gen_ai.evaluation.score.value"))) is not None]
    failure = root.error if root is not None and root is not span else None
    wrong = judged and any(event.values.get("gen_ai.evaluation.score.label") in WRONG for event in scores)
    if fault := rollout_fault(mode=rollout.get("agentrig.mode"), failure=failure, incorrect=wrong):
        yield span.place, fault
        return
    try:
        messages, replies, tools = _content(span)
        ids = [_json(values[key]) for key in (PROMPT_IDS, RESPONSE_IDS) if key in values]
    except (ValueError, RecursionError) as error:
        yield span.place, Unfit("its content is no JSON: a limit of attributes has cut it", str(error))
        return
    ends = items(values.get("gen_ai.response.finish_reasons"))
    reply = replies[0] if replies else None
    finish = mapping(reply).get("finish_reason") or next(iter(ends), None)
    more: dict[str, Any] = {"task": rollout.get("agentrig.task"), "reward": min(rewards) if rewards else None}
    if len(ids) == len(TOKENS):
        model = values.get("gen_ai.response.model") or values.get("gen_ai.request.model")
        more |= {**dict(zip(TOKENS, ids, strict=True)), "tokenizer": model}
    yield (
        span.place,
        line_of(
            messages=messages,
            reply=reply and {key: value for key, value in reply.items() if key != "finish_reason"},
            finish=finish,
            tools=tools,
            error=span.error,
            streamed=bool(values.get("gen_ai.request.stream") or values.get("gen_ai.request.streaming")),
            **more,
        ),
    )
    for _ in replies[1:]:
        yield span.place, Unfit("it is a further choice of one call")


def _content(span: Recorded) -> tuple[list[Any] | None, list[dict[str, Any]], Any]:
    """Return the messages of the prompt (None if there are none), the replies, and the tools."""
    values = span.values
    if "gen_ai.prompt.0.role" in values:
        request, response = request_of(values), response_of(values)
        choices = map(mapping, items(response.get("choices")))
        replies = [{**mapping(c.get("message")), "finish_reason": c.get("finish_reason")} for c in choices]
        return [{"content": None, **message} for message in request["messages"]], replies, request.get("tools")
    tools = _json(values.get("gen_ai.tool.definitions"))
    if "gen_ai.input.messages" in values or "gen_ai.output.messages" in values:
        first = _openai({"role": "system", "parts": _json(values.get("gen_ai.system_instructions"))})
        said = [m for given in items(_json(values.get("gen_ai.input.messages"))) for m in _openai(given)]
        replies = []
        for given in map(mapping, items(_json(values.get("gen_ai.output.messages")))):
            replies += [{**m, "finish_reason": given.get("finish_reason")} for m in _openai(given, "assistant")[:1]]
        return [*(m for m in first if m.get("content")), *said] or None, replies, tools
    prompt, replies = [], []
    for event in span.events:
        body = event.body
        if event.name == CHOICE:
            message = _json_or(body.get("message"), body.get("message") or body.get("content"))
            reply = dict(message) if isinstance(message, Mapping) else {"content": message}
            replies.append({"role": "assistant", **reply, "finish_reason": body.get("finish_reason")})
        elif event.name in MESSAGES:
            told = {"role": body.get("role") or MESSAGES[event.name], "content": body.get("content")}
            if body.get("tool_calls"):
                told["tool_calls"] = _json_or(body["tool_calls"], body["tool_calls"])
            if told["role"] == "tool":
                told["tool_call_id"] = body.get("id")
            prompt.append(told)
    return prompt or None, replies, tools


def _openai(given: Any, role: str = "user") -> list[dict[str, Any]]:
    """Return a message of the conventions, a role and parts, in OpenAI's form; several for several tools' answers."""
    message = mapping(given)
    if not isinstance(message.get("parts"), list):
        return [dict(message)]
    content: list[dict[str, Any]] = []
    calls, answers, thoughts = [], [], []
    listed = False  # agentrig writes a list of OpenAI's parts with their `text` beside `content`
    for part in map(mapping, message["parts"]):
        kind = part.get("type")
        if kind == "tool_call":
            arguments = part.get("arguments")
            text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
            function = {"name": part.get("name"), "arguments": text}
            calls.append({"id": part.get("id"), "type": "function", "function": function})
        elif kind == "tool_call_response":
            said = part.get("response", part.get("result"))
            texts = isinstance(said, list) and all(mapping(piece).get("type") == "text" for piece in said)
            if not isinstance(said, str) and not texts:
                said = "" if said is None else json.dumps(said, ensure_ascii=False)
            answers.append({"role": "tool", "tool_call_id": part.get("id"), "content": said})
        elif kind == "reasoning":
            thoughts.append(str(part.get("content") or ""))
        else:
            listed = listed or "text" in part
            content.append({"type": kind, "text": part.get("text", part.get("content"))})
    found: dict[str, Any] = {"role": message.get("role") or role, "content": content or None}
    if len(content) == 1 and content[0]["type"] == "text" and not listed:
        found["content"] = content[0]["text"]
    if calls:
        found["tool_calls"] = calls
    if thoughts:
        found["reasoning_content"] = "".join(thoughts)
    if isinstance(message.get("name"), str):
        found["name"] = message["name"]
    return answers if answers and not content and not calls else [found, *answers]


def _event(event: Mapping[str, Any]) -> Event:
    """Return an event of a span, or a log record: a message lies in its body, in one attribute, or in several."""
    values = _values(event.get("attributes"))
    body = _value(event.get("body")) if "body" in event else None
    said = _json_or(values.get("gen_ai.event.content"), _json_or(body, values))
    time = event.get("timeUnixNano") or event.get("observedTimeUnixNano") or 0
    name = event.get("name") or event.get("eventName") or values.get("event.name")
    return Event(str(name), int(time) if str(time).isdigit() else 0, values, mapping(said) or values)


def _values(attributes: Any) -> dict[str, Any]:
    """Return attributes as plain data."""
    if isinstance(attributes, Mapping):
        return dict(attributes)
    return {str(given.get("key")): _value(given.get("value")) for given in map(mapping, items(attributes))}


def _value(value: Any) -> Any:
    """Return a value of OTLP as plain data; None for one of no known kind."""
    for kind, held in mapping(value).items():
        if kind in ("stringValue", "boolValue", "doubleValue", "bytesValue"):
            return held
        if kind == "intValue":
            return int(held) if str(held).lstrip("-").isdigit() else None
        if kind == "arrayValue":
            return [_value(inner) for inner in items(mapping(held).get("values"))]
        if kind == "kvlistValue":
            return _values(mapping(held).get("values"))
    return None


def _json(value: Any) -> Any:
    """Return the value of a JSON text; anything else as it is."""
    return json.loads(value) if isinstance(value, str) else value


def _json_or(value: Any, other: Any) -> Any:
    try:
        found = _json(value)
    except (ValueError, RecursionError):
        return other
    return other if found is None else found
