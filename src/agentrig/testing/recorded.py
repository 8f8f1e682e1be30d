"""Recorded traces of five frameworks, as the tracer recorded them.

Their calls go through tools, streams, two calls at once, a server that was busy, a stream that broke, and another
server than the run's.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources

from agentrig.traces import Span, Trace

FRAMEWORKS = ("langgraph", "openai", "httpx", "streaming", "agents-sdk")
"""LangGraph; the OpenAI client with tools; plain httpx; asynchronous streams; the OpenAI Agents SDK."""


@cache
def _text(name: str) -> str:
    return (resources.files("agentrig.testing") / "traces" / f"{name}.json").read_text("utf-8")


def recorded_traces() -> dict[str, Trace]:
    """Return the traces by framework; each call returns new objects."""
    return {name: trace_of(name, _text(name)) for name in FRAMEWORKS}


def trace_of(name: str, text: str) -> Trace:
    """Return a trace from the JSON text of its spans."""
    return Trace(rollout_id=name, spans=tuple(Span(**row) for row in json.loads(text)))
