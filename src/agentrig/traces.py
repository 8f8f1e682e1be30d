"""Traces: what was recorded of a rollout, as spans that mirror OpenTelemetry's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs

LLM_CALL = "openai.chat.completion"
"""Span name of an LLM call. Its attributes: `request` and `response` (the JSON bodies),
`gen_ai.response.id`, `prompt_token_ids`, `response_token_ids`, `response_logprobs` (lists; absent
when the endpoint did not return them)."""

SERVER = "agentrig.server"
"""Attribute of a call that went to another server than the run's: that server. Such a call has no token ids."""

MISSED = "agentrig.missed"
"""Attribute of a rollout's root span: by library, how many connections to the run's server nothing recorded."""

NODE = "langchain.chain.type"
"""Attribute that holds the name of the graph node or chain that a span stands for."""


ATTRIBUTES: Mapping[str, str] = {
    "request": "LLM call: the body that was sent, with what the tracer asked for",
    "response": "LLM call: the body that came back, a stream joined into one; without the token ids below",
    "prompt_token_ids": "LLM call: the prompt's token ids, as the server made them",
    "response_token_ids": "LLM call: the sampled token ids of the first choice",
    "response_logprobs": "LLM call: the log-probability of each of these under the sampling model",
    "finish_reason": "LLM call: why the first choice ended: `stop`, `length`, `tool_calls` …",
    "gen_ai.response.id": "LLM call: the completion's id",
    SERVER: "LLM call: the server, when it is another than the run's; such a call has no token ids",
    NODE: "chain: the name of the graph node or chain",
    "agent.name": "agent: the name that `agentrig.span` gave",
    "tool.name": "tool: its name",
    "input": "first chain, tool: what it was given, cut at 20,000 characters of JSON",
    "output": "chain, tool: what it returned, cut likewise",
    MISSED: "rollout (the root): by library, how many connections to the run's server nothing recorded",
}
"""What the tracer's own spans hold: attribute to the kind of span and its meaning. Spans that an agent of Agent
Lightning emits, or a tracer of its own records, have what these give them."""


def node_of(attributes: Mapping[str, Any]) -> str | None:
    """Return the graph node's (or agent's) name from a span's attributes, when the span stands for one."""
    name = attributes.get(NODE) or attributes.get("agent.name")
    return name if isinstance(name, str) else None


@attrs.frozen(kw_only=True)
class Span:
    """One recorded operation.

    Attributes:
        id: Unique within the trace.
        parent: The enclosing span's id, or None at the root.
        name: The operation; `LLM_CALL` for calls to the model, `chain.chain` for a graph node.
        start: Unix time in seconds.
        end: Unix time in seconds.
        error: The exception in words, or None.
        attributes: JSON values.
    """

    id: str
    parent: str | None
    name: str
    start: float
    end: float
    error: str | None = None
    attributes: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def node(self) -> str | None:
        """The graph node's (or agent's) name, when the span stands for one."""
        return node_of(self.attributes)


@attrs.frozen(kw_only=True, slots=False)
class Trace:
    """All spans of one rollout, in the order in which they started.

    Attributes:
        rollout_id: Whose spans these are.
        spans: The root first, which is called `rollout`.
    """

    rollout_id: str
    spans: Sequence[Span] = ()

    @cached_property
    def _by_id(self) -> dict[str, Span]:
        return {span.id: span for span in self.spans}

    def llm_calls(self) -> list[Span]:
        """Return the spans of calls to the model that came back, in order of their start."""
        return [s for s in self.spans if s.name == LLM_CALL and s.error is None]

    def ancestors(self, span: Span) -> Iterator[Span]:
        """Yield the span's parent, its parent, and so on up to the root."""
        seen = {span.id}
        while span.parent is not None and span.parent not in seen:
            parent = self._by_id.get(span.parent)
            if parent is None:
                return
            seen.add(parent.id)
            yield parent
            span = parent

    def nodes(self, span: Span) -> list[str]:
        """Return the names of the graph nodes that enclose a span, innermost first."""
        return [s.node for s in self.ancestors(span) if s.node is not None]
