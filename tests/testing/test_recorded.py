"""The recorded traces are what the tracer records of these frameworks today."""

from __future__ import annotations

from typing import Any

import pytest
from record_traces import record

from agentrig.testing.recorded import FRAMEWORKS
from agentrig.traces import LLM_CALL, Trace

ELSEWHERE = "agents-sdk"
"""Needs a newer OpenAI client than Agent Lightning allows; recorded in an environment of its own."""


def calls(trace: Trace) -> list[Any]:
    keys = ("prompt_token_ids", "response_token_ids", "response_logprobs", "finish_reason")
    found = [
        [trace.nodes(s), s.error, [s.attributes.get(key) for key in keys], s.attributes["request"]["messages"]]
        for s in trace.spans
        if s.name == LLM_CALL
    ]
    return sorted(found, key=str)  # two of them run at once


@pytest.mark.parametrize("name", [name for name in FRAMEWORKS if name != ELSEWHERE])
def test_a_trace_is_what_the_tracer_records(name: str, recorded_traces: dict[str, Trace]) -> None:
    assert calls(record(name)) == calls(recorded_traces[name])


def test_the_traces_have_what_adapters_must_bear(recorded_traces: dict[str, Trace]) -> None:
    errors = [str(s.error) for trace in recorded_traces.values() for s in trace.spans if s.error]
    assert any("HTTP 503" in error for error in errors)
    assert any("the stream broke" in error for error in errors)
    assert len(recorded_traces["openai"].llm_calls()) == 3
    requests = [s.attributes["request"] for s in recorded_traces[ELSEWHERE].llm_calls()]
    assert [bool(r.get("tools")) for r in requests] == [True, True]
    assert requests[1]["messages"][-1]["role"] == "tool"
