"""Recorded traces of five frameworks, as the tracer recorded them.

Their calls go through tools, streams, two calls at once, a server that was busy, a stream that broke, and another
server than the run's.
"""

from __future__ import annotations

import json
from importlib import resources

from agentrig.traces import Span, Trace

FRAMEWORKS = ("langgraph", "openai", "httpx", "streaming", "agents-sdk")
"""LangGraph; the OpenAI client with tools; plain httpx; asynchronous streams; the OpenAI Agents SDK."""


def recorded_traces() -> dict[str, Trace]:
    """Return the traces by framework; each call returns new objects."""
    folder = resources.files("agentrig.testing") / "traces"
    rows = {name: json.loads((folder / f"{name}.json").read_text("utf-8")) for name in FRAMEWORKS}
    return {name: Trace(rollout_id=name, spans=tuple(Span(**row) for row in of)) for name, of in rows.items()}
