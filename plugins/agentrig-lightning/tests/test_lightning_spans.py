"""Spans of Agent Lightning's tracers through agentrig's traces, and agentrig's own through its adapters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from agentlightning import Span as LightningSpan
from agentlightning import TracerTraceToTriplet, TraceToMessages
from agentlightning.types import Event, Link, OtelResource, SpanContext, TraceStatus
from agentrig_lightning.spans import from_lightning, to_lightning
from there_and_back import there_and_back

from agentrig.traces import LLM_CALL, Span, Trace

SUPPORT = Path(__file__).parents[3] / "tests" / "support"
TOOL = {
    "type": "function",
    "function": {
        "name": "rooms",
        "description": "Lists free rooms.",
        "parameters": {"type": "object", "properties": {"time": {"type": "string"}}},
    },
}
CALLS = [{"id": f"call-{i}", "type": "function", "function": {"name": "rooms", "arguments": "{}"}} for i in (1, 2)]
IMAGE = [{"type": "text", "text": "Which room?"}, {"type": "image_url", "image_url": {"url": "file:///a.png"}}]


def agentops_span(number: int, attributes: dict[str, Any], **more: Any) -> LightningSpan:
    """A span with everything that OpenTelemetry has."""
    context = SpanContext(trace_id="t", span_id="linked", is_remote=True, trace_state={"k": "v"})
    return LightningSpan(
        **{
            "rollout_id": "r",
            "attempt_id": "a",
            "sequence_id": number,
            "trace_id": f"trace-{number}",
            "span_id": f"span-{number}",
            "parent_id": None,
            "name": LLM_CALL,
            "status": TraceStatus(status_code="UNSET"),
            "attributes": attributes,
            "events": [Event(name="token", attributes={"n": 1}, timestamp=2.5)],
            "links": [Link(context=context, attributes={"why": "retry"})],
            "start_time": float(number),
            "end_time": number + 0.5,
            "context": context,
            "parent": None,
            "resource": OtelResource(attributes={"service.name": "x"}, schema_url="s"),
            "kind": "SpanKind.CLIENT",  # what has no field of its own
            **more,
        }
    )


def own_call(request: dict[str, Any], message: dict[str, Any], **attributes: Any) -> Trace:
    """A trace with one call as agentrig's tracer records it."""
    response = {
        "id": "chatcmpl-7",
        "model": "m-1",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", **message}}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }
    call = {"request": request, "response": response, "gen_ai.response.id": "chatcmpl-7", **attributes}
    root = Span(id="root", parent=None, name="rollout", start=0.0, end=9.0)
    spans = (root, Span(id="c", parent="root", name=LLM_CALL, start=1.0, end=2.0, attributes=call))
    return Trace(rollout_id="r", spans=spans)


def test_spans_of_another_tracer_come_back_unchanged() -> None:
    spans = [
        agentops_span(2, {"prompt_token_ids": [1, 2], "gen_ai.prompt.0.role": "user", "logprobs.content": "[]"}),
        agentops_span(3, {"n": 1.5, "names": ["a", "b"]}, parent_id="span-2", name="work", start_time=1.0),
        agentops_span(
            4, {}, start_time=None, end_time=None, status=TraceStatus(status_code="ERROR", description="broken")
        ),
    ]
    assert there_and_back(spans) == spans
    trace = from_lightning("r", spans)
    assert {s.id: s.error for s in trace.spans} == {"span-2": None, "span-3": None, "span-4": "broken"}


def test_a_trace_with_spans_of_another_tracer_keeps_them_in_order() -> None:
    inner = from_lightning("r", [agentops_span(7, {"n": 1})]).spans
    trace = Trace(rollout_id="r", spans=(Span(id="root", parent=None, name="rollout", start=0, end=9), *inner))
    root, call = to_lightning(trace, "r2", "a2")
    assert (root.sequence_id, call.sequence_id, call.trace_id) == (1, 2, "trace-7")
    assert (call.rollout_id, call.attempt_id, call.links[0].context.span_id) == ("r2", "a2", "linked")


def test_a_call_of_agentops_has_request_response_and_logprobs() -> None:
    attributes = {
        "gen_ai.request.model": "m",
        "gen_ai.request.temperature": 0.7,
        "gen_ai.request.streaming": False,
        "gen_ai.prompt.0.role": "user",
        "gen_ai.prompt.0.content": json.dumps(IMAGE),
        "gen_ai.prompt.1.role": "assistant",
        "gen_ai.prompt.1.tool_calls.0.id": "call-1",
        "gen_ai.prompt.1.tool_calls.0.name": "rooms",
        "gen_ai.prompt.1.tool_calls.0.arguments": "{}",
        "gen_ai.prompt.prompt_filter_results": "[]",
        "gen_ai.request.functions.0.name": "rooms",
        "gen_ai.request.functions.0.description": "Lists free rooms.",
        "gen_ai.request.functions.0.parameters": json.dumps(TOOL["function"]["parameters"]),  # type: ignore[index]
        "gen_ai.response.id": "x",
        "gen_ai.usage.total_tokens": 3,
        "gen_ai.completion.0.role": "assistant",
        "gen_ai.completion.0.finish_reason": "tool_calls",
        "logprobs.content": json.dumps([{"token": "o", "logprob": -0.5}, {"token": "d", "logprob": -0.25}]),
    }
    tool = {"tool.name": "rooms", "tool.parameters": "{}", "tool.call.id": "call-2", "tool.call.type": "function"}
    spans = [agentops_span(1, attributes), agentops_span(2, tool, parent_id="span-1", name="tool_call.rooms")]
    (call,) = from_lightning("r", spans).llm_calls()
    assert call.attributes["request"] == {
        "model": "m",
        "temperature": 0.7,
        "messages": [{"role": "user", "content": IMAGE}, {"role": "assistant", "tool_calls": CALLS[:1]}],
        "tools": [TOOL],
    }
    response = call.attributes["response"]
    assert (response["id"], response["usage"]) == ("x", {"total_tokens": 3})
    assert response["choices"] == [
        {
            "index": 0,
            "finish_reason": "tool_calls",
            "message": {"role": "assistant", "content": None, "tool_calls": CALLS[1:]},
        }
    ]
    assert (call.attributes["response_logprobs"], call.attributes["finish_reason"]) == ([-0.5, -0.25], "tool_calls")


def test_an_agents_tools_reach_the_adapter_of_messages() -> None:
    messages = [
        {"role": "user", "content": "Find a room."},
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "tool", "content": "none", "tool_call_id": "call-1"},
    ]
    trace = own_call({"model": "m", "messages": messages, "tools": [TOOL]}, {"content": None, "tool_calls": CALLS})
    (conversation,) = TraceToMessages().adapt(to_lightning(trace, "r", "a"))
    assert conversation["tools"] == [TOOL]
    user, asked, tool, answer = conversation["messages"]
    assert (user, tool) == (messages[0], messages[2])
    assert asked == answer == {"role": "assistant", "content": None, "tool_calls": CALLS}


def test_a_call_has_the_attributes_that_agentops_records() -> None:
    request = {"model": "m", "temperature": 0.5, "stream": True, "messages": [{"role": "user", "content": IMAGE}]}
    trace = own_call(
        request, {"content": "Lyra"}, prompt_token_ids=[1], response_token_ids=[2, 3], response_logprobs=[-1.0, -2.0]
    )
    (triplet,) = TracerTraceToTriplet().adapt(to_lightning(trace, "r", "a"))
    assert triplet.prompt["image_urls"] == ["file:///a.png"]
    assert triplet.prompt["raw_content"] == [{"role": "user", "content": json.dumps(IMAGE)}]
    assert triplet.response["raw_content"] == [{"role": "assistant", "content": "Lyra", "finish_reason": "stop"}]
    assert triplet.response["logprobs"] == [{"logprob": -1.0}, {"logprob": -2.0}]
    assert triplet.metadata["response_id"] == "chatcmpl-7"
    assert triplet.metadata["request"] == {"model": "m", "temperature": 0.5, "streaming": True, "type": "chat"}
    assert triplet.metadata["response"] == {"id": "chatcmpl-7", "model": "m-1"}


@pytest.mark.skipif("AGENTRIG_AGENT_LIGHTNING" not in os.environ, reason="AGENTRIG_AGENT_LIGHTNING names no checkout")
def test_upstreams_own_adapter_tests_pass_with_spans_that_went_through_a_trace() -> None:
    upstream = Path(os.environ["AGENTRIG_AGENT_LIGHTNING"])
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, f"--rootdir={upstream}", "-q", "-s"]
    command += ["-p", "no:cacheprovider", "-p", "there_and_back", str(upstream / "tests" / "adapter")]
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert "21 passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]
    assert "spans there and back: 72" in done.stdout
