"""Traces as Agent Lightning's spans, and back; and the rewards among those."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from agentlightning import Span as LightningSpan
from agentlightning.emitter import emit_reward, find_final_reward, get_reward_value
from agentlightning.semconv import LightningSpanAttributes
from agentlightning.types import OtelResource, SpanCoreFields, TraceStatus
from opentelemetry.sdk.trace import ReadableSpan

from agentrig.traces import LLM_CALL, REWARD, SERVER, Span, Trace, mapping
from agentrig.tracing.gen_ai import TOOL_CALL, flat, logprobs_of, request_of, response_of, tool_calls
from agentrig.tracing.recorder import Recorder

log = logging.getLogger(__name__)

RECORDED = ("request", "response", "response_logprobs", "finish_reason", SERVER)
"""Attributes that agentrig adds to an LLM call which another tracer recorded."""

THEIR_REWARD = LightningSpanAttributes.REWARD.value
"""How the names of the attributes of a reward begin."""

SIMPLE = str | int | float | bool

RUN_SCORE = "agentrig.score"
"""Attribute of the reward span that a run adds to a rollout: the score of the run's own reward."""


def to_lightning(trace: Trace, rollout_id: str, attempt_id: str) -> list[LightningSpan]:
    """Return a trace's spans as Agent Lightning's, with the attribute names that its adapters read.

    Spans that `from_lightning` made become what they were. Other LLM calls get the attributes that AgentOps records,
    and a child span for each tool call in their response.
    """
    trace_id = rollout_id.encode().hex()[-32:].rjust(32, "0")  # any 16 bytes do
    found: list[LightningSpan] = []
    for span in trace.spans:
        if span.otel:
            found.append(_restored(span, rollout_id, attempt_id, len(found) + 1))
            continue
        found.append(_made(span, rollout_id, attempt_id, len(found) + 1, trace_id))
        for tool in _tool_spans(span):
            found.append(_made(tool, rollout_id, attempt_id, len(found) + 1, trace_id))
    if trace.spans and all("sequence_id" in span.otel for span in trace.spans):
        for restored, span in zip(found, trace.spans, strict=True):
            restored.sequence_id = span.otel["sequence_id"]
        found.sort(key=lambda s: s.sequence_id)
    return found


def _made(span: Span, rollout_id: str, attempt_id: str, number: int, trace_id: str) -> LightningSpan:
    return LightningSpan.model_construct(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        sequence_id=number,
        trace_id=trace_id,
        span_id=span.id,
        parent_id=span.parent,
        name=span.name,
        status=TraceStatus.model_construct(status_code="ERROR" if span.error else "OK", description=span.error),
        attributes=_lightning_attributes(span),
        events=[],
        links=[],
        start_time=span.start,
        end_time=span.end,
        context=None,
        parent=None,
        resource=OtelResource(attributes={}, schema_url=""),
    )


def _restored(span: Span, rollout_id: str, attempt_id: str, number: int) -> LightningSpan:
    ours = RECORDED if span.name == LLM_CALL else (REWARD,)
    return LightningSpan.model_validate(
        {
            "start_time": span.start,
            "end_time": span.end,
            **span.otel,
            "rollout_id": rollout_id,
            "attempt_id": attempt_id,
            "sequence_id": number,
            "span_id": span.id,
            "parent_id": span.parent,
            "name": span.name,
            "attributes": {k: v for k, v in span.attributes.items() if k not in ours},
        }
    )


def _tool_spans(call: Span) -> Iterator[Span]:
    if call.name != LLM_CALL or call.error is not None:
        return
    for i, (name, attributes) in enumerate(tool_calls(mapping(call.attributes.get("response")))):
        known = hashlib.blake2b(f"{call.id}/{i}".encode(), digest_size=8).hexdigest()
        yield Span(id=known, parent=call.id, name=name, start=call.end, end=call.end, attributes=attributes)


def _lightning_attributes(span: Span) -> dict[str, Any]:
    if span.name != LLM_CALL:
        found = {k: v if _is_simple(v) else json.dumps(v) for k, v in span.attributes.items() if v is not None}
        given = found.pop(REWARD, None)
        if given is not None and not any(key.startswith(THEIR_REWARD) for key in found):  # by `agentrig.reward`
            found |= {f"{THEIR_REWARD}.0.name": "primary", f"{THEIR_REWARD}.0.value": given}
        return found
    found = flat(mapping(span.attributes.get("request")), mapping(span.attributes.get("response")))
    for key in ("prompt_token_ids", "response_token_ids", "gen_ai.response.id"):
        if span.attributes.get(key):
            found[key] = span.attributes[key]
    if span.attributes.get("response_logprobs"):
        numbers = json.dumps(span.attributes["response_logprobs"])[1:-1]  # an object each, without making a dict each
        found["logprobs.content"] = '[{"logprob": ' + numbers.replace(", ", '}, {"logprob": ') + "}]"
    return found


def _is_simple(value: Any) -> bool:
    """Whether OpenTelemetry takes a value as an attribute: a simple one, or a list of one simple type."""
    if isinstance(value, list):
        return len({type(item) for item in value}) <= 1 and all(isinstance(item, SIMPLE) for item in value)
    return isinstance(value, SIMPLE)


def from_lightning(rollout_id: str, spans: Sequence[LightningSpan]) -> Trace:
    """Return Agent Lightning's spans as a trace.

    LLM calls also get the attributes that agentrig's own tracer records, as far as theirs have the content.
    """
    children: dict[str, list[LightningSpan]] = {}
    for span in spans:
        if span.parent_id is not None:
            children.setdefault(span.parent_id, []).append(span)
    found = [
        Span(
            id=s.span_id,
            parent=s.parent_id,
            name=s.name,
            start=s.start_time or 0.0,
            end=s.end_time or 0.0,
            error=error_of(s.status),
            attributes=_attributes(s, children.get(s.span_id, ())),
            otel=_rest(s),
        )
        for s in sorted(spans, key=lambda s: (s.start_time or 0.0, s.sequence_id))
    ]
    return Trace(rollout_id=rollout_id, spans=tuple(found))


def error_of(status: TraceStatus) -> str | None:
    """Return the error of a span's status as text, or None."""
    return (status.description or "error") if status.status_code == "ERROR" else None


def _attributes(span: LightningSpan, children: Sequence[LightningSpan]) -> dict[str, Any]:
    found: dict[str, Any] = {k: list(v) if isinstance(v, tuple) else v for k, v in span.attributes.items()}
    if span.name != LLM_CALL:
        return found | own_reward(span)
    tools = [c.attributes for c in children if c.name.startswith(TOOL_CALL)]
    response, logprobs = response_of(found, tools), logprobs_of(found)
    reason = next((c["finish_reason"] for c in response["choices"] if c["finish_reason"]), None)
    more = {"response_logprobs": logprobs, "finish_reason": reason}
    added = {"request": request_of(found), "response": response, **{k: v for k, v in more.items() if v is not None}}
    return {**added, **found}


def _rest(span: LightningSpan) -> dict[str, Any]:
    kept = {"rollout_id", "attempt_id", "span_id", "parent_id", "name", "attributes"}
    kept.update(name for name in ("start_time", "end_time") if getattr(span, name) is not None)
    rest: dict[str, Any] = span.model_dump(mode="json", exclude=kept)
    return rest


def own_reward(span: Any) -> dict[str, float]:
    """Return the attribute by which agentrig reads a reward that `emit_reward` wrote; empty for any other span."""
    reward = get_reward_value(span)
    return {} if reward is None else {REWARD: reward}


def final_reward(spans: Sequence[LightningSpan]) -> float | None:
    """Return the last reward that was emitted among spans, or None."""
    reward: float | None = find_final_reward(list(spans)) if spans else None
    return reward


# --- what an agent has returned, and what a run has scored ------------------------------------------


def reported(result: Any, recorder: Recorder) -> float | None:
    """Return the reward of a rollout from what its agent returned, as Agent Lightning's runner reads it.

    Spans that the agent returned are recorded, and so is a number, as the rollout's last reward.

    Raises:
        TypeError: The agent returned something else.
    """
    number = isinstance(result, int | float)
    if result is not None and not number and not isinstance(result, list):
        raise TypeError(f"the agent returned {type(result).__name__}; a LitAgent returns None, a number or spans")
    cores = [emit_reward(float(result), propagate=False)] if number else result
    if cores is not None and not cores:
        log.warning("rollout %s: the agent returned an empty list: it has no reward", recorder.rollout_id)
        return None
    if cores:
        spans = [as_span(core, recorder.rollout_id) for core in cores]
        recorder.adopt(from_lightning(recorder.rollout_id, spans).spans)
    return float(result) if number else final_reward(so_far(recorder))


def so_far(recorder: Recorder, attempt_id: str = "") -> list[LightningSpan]:
    """Return the spans of a rollout that have ended, as Agent Lightning's."""
    trace = Trace(rollout_id=recorder.rollout_id, spans=tuple(recorder.finished()))
    return to_lightning(trace, recorder.rollout_id, attempt_id)


def as_span(given: Any, rollout_id: str = "") -> LightningSpan:
    """Return a span of OpenTelemetry or Agent Lightning as Agent Lightning's."""
    if isinstance(given, ReadableSpan):
        return LightningSpan.from_opentelemetry(given, rollout_id, "", 0)
    if isinstance(given, SpanCoreFields):
        return LightningSpan.from_core_fields(given, rollout_id=rollout_id)
    if isinstance(given, LightningSpan):
        return given
    raise TypeError(
        f"the agent returned a list with {type(given).__name__}; a LitAgent returns None, a number or spans of "
        "OpenTelemetry or Agent Lightning"
    )


def score_span(value: float, *, rollout_id: str, attempt_id: str, sequence_id: int) -> LightningSpan:
    """Return the reward span with a run's score of a rollout."""
    core = emit_reward(value, attributes={RUN_SCORE: True}, propagate=False)
    return LightningSpan.from_core_fields(core, rollout_id=rollout_id, attempt_id=attempt_id, sequence_id=sequence_id)


def run_score(spans: Sequence[LightningSpan]) -> float | None:
    """Return the score that the run added to a rollout's spans, or None."""
    return final_reward([span for span in spans if span.attributes.get(RUN_SCORE)])
