"""A rollout as OpenTelemetry spans: `invoke_agent` at the root, `chat` for calls to a model, `execute_tool` for tools.

A graph node, or a part that `agentrig.span` names, is a span of its own name. The score is an event of the root,
`gen_ai.evaluation.result`. Parents, times and errors are those of the trace. The private part of a task is in no span.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import attrs

from agentrig.errors import extra
from agentrig.rollouts import Rollout
from agentrig.text import cut, json_text, storable
from agentrig.traces import FEEDBACK, LLM_CALL, SERVER, Span, items, mapping

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

LIMIT = 20_000
"""Longest attribute that a collector gets, in characters."""

PROMPT_IDS, RESPONSE_IDS = "agentrig.prompt_token_ids", "agentrig.response_token_ids"
"""Attributes of a call in a file: its exact token ids, as JSON."""

SCHEMA = "https://opentelemetry.io/schemas/1.43.0"
"""The version of the semantic conventions: every `gen_ai.*` name here is part of it."""

REQUEST: Mapping[str, str] = {
    "model": "gen_ai.request.model",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "seed": "gen_ai.request.seed",
    "n": "gen_ai.request.choice.count",
    "stream": "gen_ai.request.stream",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
}
"""Fields of a request's body, and their attributes."""

OWN_ID = re.compile(r"(?!0{16})[0-9a-f]{16}")
"""Ids of spans that OpenTelemetry accepts as they are."""


@attrs.frozen(kw_only=True)
class Origin:
    """The run that rollouts come from.

    Attributes:
        run: The run's name.
        agent: The agent's name.
        reward: The reward's name.
        content: Whether messages, arguments and results are part of the spans.
        whole: Whether texts are whole and calls have their token ids, as in a file; a collector gets neither.
    """

    run: str
    agent: str
    reward: str
    content: bool = True
    whole: bool = False


def trace_id(rollout_id: str) -> int:
    """Return a rollout's trace id, the same in every export: 128 bits."""
    return int.from_bytes(hashlib.sha256(rollout_id.encode()).digest()[:16], "big") or 1


def span_id(rollout_id: str, own: str) -> int:
    """Return a span's id: its own if it has 64 bits, else a digest; the same in every export."""
    if OWN_ID.fullmatch(own):
        return int(own, 16)
    return int.from_bytes(hashlib.sha256(f"{rollout_id}/{own}".encode()).digest()[:8], "big") or 1


def spans_of(rollout: Rollout, origin: Origin) -> list[ReadableSpan]:
    """Return a rollout's trace as spans of OpenTelemetry's SDK, in their order of start."""
    with extra("otlp", "traces for a collector need OpenTelemetry's SDK"):
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    own = version("agentrig")
    resource = Resource({"service.name": "agentrig", "service.version": own, "agentrig.run": origin.run})
    scope = InstrumentationScope("agentrig", own, schema_url=SCHEMA)
    trace = trace_id(rollout.id)

    def context(own: str) -> SpanContext:
        return SpanContext(trace, span_id(rollout.id, own), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    found = []
    for place, span in enumerate(rollout.trace.spans):
        name, attributes = _named(span, origin)
        error, events = span.error, []
        if not place:
            name, more = _root(rollout, origin)
            attributes, error = {**attributes, **more}, span.error or rollout.failure
            events = (
                [Event("gen_ai.evaluation.result", _score(rollout, origin), timestamp=_ns(span.end))]
                if rollout.score
                else []
            )
        if error is not None:
            attributes.setdefault("error.type", cut(error.partition(":")[0], 200))
        status = Status(StatusCode.ERROR, cut(error, LIMIT)) if error is not None else Status(StatusCode.UNSET)
        found.append(
            ReadableSpan(
                name,
                context=context(span.id),
                parent=context(span.parent) if span.parent is not None else None,
                resource=resource,
                attributes=_plain(attributes, origin.whole),
                events=events,
                kind=SpanKind.CLIENT if span.name == LLM_CALL else SpanKind.INTERNAL,
                status=status,
                start_time=_ns(span.start),
                end_time=_ns(span.end),
                instrumentation_scope=scope,
            )
        )
    return found


def _root(rollout: Rollout, origin: Origin) -> tuple[str, dict[str, Any]]:
    """Return name and attributes of the span around a whole rollout."""
    found: dict[str, Any] = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": origin.agent,
        "agentrig.rollout": rollout.id,
        "agentrig.task": rollout.task.id,
        "agentrig.group": rollout.group,
        "agentrig.mode": rollout.mode,
        "agentrig.step": rollout.step,
        "agentrig.weights": rollout.version,
        "error.type": rollout.failure,
    }
    if origin.content:
        found["gen_ai.input.messages"] = _messages([{"role": "user", "content": json_text(dict(rollout.task.input))}])
        if rollout.outcome.answer is not None:
            answer = rollout.outcome.answer
            text = answer if isinstance(answer, str) else json_text(answer)
            found["gen_ai.output.messages"] = _messages([{"role": "assistant", "content": text}])
    return f"invoke_agent {origin.agent}", found


def _score(rollout: Rollout, origin: Origin) -> dict[str, Any]:
    """Return the attributes of the event with the score; its details may hold gold answers, so they are left out."""
    assert rollout.score is not None
    label: str = rollout.score.status
    if rollout.correct is not None:
        label = "correct" if rollout.correct else "incorrect"
    found = {
        "gen_ai.evaluation.name": origin.reward,
        "gen_ai.evaluation.score.value": rollout.score.value,
        "gen_ai.evaluation.score.label": label,
        "error.type": "reward-invalid" if rollout.score.status == "invalid" else None,
    }
    return {key: value for key, value in found.items() if value is not None}


def _named(span: Span, origin: Origin) -> tuple[str, dict[str, Any]]:
    """Return a span's name and attributes."""
    attributes = span.attributes
    if span.name == LLM_CALL:
        return _chat(span, origin)
    tool = attributes.get("tool.name")
    if isinstance(tool, str) and span.name == "tool":
        found: dict[str, Any] = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": tool,
            "gen_ai.tool.type": "function",
        }
        if origin.content:
            found |= {
                "gen_ai.tool.call.arguments": attributes.get("input"),
                "gen_ai.tool.call.result": attributes.get("output"),
            }
        return f"execute_tool {tool}", found
    kept = {k: v for k, v in attributes.items() if not k.startswith("gen_ai.") and k not in ("input", "output")}
    if not origin.content:
        kept.pop(FEEDBACK, None)
    else:
        kept |= {f"agentrig.{k}": attributes[k] for k in ("input", "output") if k in attributes}
    return span.node or span.name, kept


def _chat(span: Span, origin: Origin) -> tuple[str, dict[str, Any]]:
    request, response = (mapping(span.attributes.get(key)) for key in ("request", "response"))
    usage = mapping(response.get("usage"))
    prompt, sampled = (span.attributes.get(f"{part}_token_ids") for part in ("prompt", "response"))
    choices = [mapping(choice) for choice in items(response.get("choices"))]
    found: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",  # the protocol that it speaks, whatever the server
        **{attribute: request[key] for key, attribute in REQUEST.items() if request.get(key) is not None},
        "gen_ai.response.id": response.get("id"),
        "gen_ai.response.model": response.get("model"),
        "gen_ai.response.finish_reasons": [str(c["finish_reason"]) for c in choices if c.get("finish_reason")] or None,
        "gen_ai.usage.input_tokens": usage.get("prompt_tokens", len(items(prompt)) or None),
        "gen_ai.usage.output_tokens": usage.get("completion_tokens", len(items(sampled)) or None),
        "server.address": span.attributes.get(SERVER),
    }
    if origin.content:
        found["gen_ai.input.messages"] = _messages(request.get("messages"))
        found["gen_ai.output.messages"] = _messages(
            [{**mapping(c.get("message")), "finish": c.get("finish_reason")} for c in choices]
        )
        found["gen_ai.tool.definitions"] = json_text(request["tools"]) if request.get("tools") else None
        if origin.whole and prompt and sampled:
            found |= {PROMPT_IDS: json_text(prompt), RESPONSE_IDS: json_text(sampled)}
    model = request.get("model")
    return f"chat {cut(storable(str(model)), 200)}" if model else "chat", found


def _messages(messages: Any) -> str | None:
    """Return messages as JSON in the form of the conventions: a role, and parts. What is no message is JSON in one."""
    found = []
    for given in items(messages) or filter(None, [messages]):
        message = given if isinstance(given, Mapping) else {"content": json_text(given)}
        content: Any = message.get("content")
        parts: list[dict[str, Any]] = []
        if isinstance(thought := message.get("reasoning_content") or message.get("reasoning"), str):
            parts.append({"type": "reasoning", "content": thought})
        answers = message.get("tool_call_id")
        if content is not None and answers is not None:
            parts.append({"type": "tool_call_response", "id": answers, "response": content})
        elif isinstance(content, str):
            parts.append({"type": "text", "content": content})
        elif isinstance(content, list):
            parts += [{**mapping(p), "content": mapping(p).get("text", json_text(p))} for p in content]
        elif content is not None:
            parts.append({"type": "text", "content": json_text(content)})
        for call in map(mapping, items(message.get("tool_calls"))):
            function = mapping(call.get("function"))
            parts.append(
                {"type": "tool_call", "id": call.get("id"), "name": function.get("name"),
                 "arguments": function.get("arguments")}
            )  # fmt: skip
        one = {"role": message.get("role") or "assistant", "parts": parts}
        if isinstance(message.get("name"), str):
            one["name"] = message["name"]
        if message.get("finish"):
            one["finish_reason"] = message["finish"]
        found.append(one)
    return json_text(found) if found else None


def _plain(attributes: Mapping[str, Any], whole: bool) -> dict[str, Any]:
    """Return attributes with values that OpenTelemetry has; others become JSON, and None is left out."""
    found: dict[str, Any] = {}

    def text(value: str) -> str:
        return value if whole else cut(value, LIMIT)

    for key, value in attributes.items():
        if isinstance(value, str):
            found[key] = text(storable(value))
        elif isinstance(value, bool | float) or (isinstance(value, int) and -(1 << 63) <= value < 1 << 63):
            found[key] = value
        elif key == "gen_ai.response.finish_reasons" and value:
            found[key] = tuple(map(storable, value))
        elif value is not None:
            found[key] = text(json_text(value))
    return found


def _ns(seconds: float) -> int:
    """Return Unix time in nanoseconds; a float has about 200 ns of precision."""
    return round(seconds * 1e9)
