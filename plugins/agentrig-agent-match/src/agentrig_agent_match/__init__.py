"""The adapter `agent-match`: trains the LLM calls whose node's name, and whose model's name, match."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from agentrig import AdapterSpec, Span, Trace, Triplet, hookimpl, setting
from agentrig.adapters import triplet_of
from agentrig.ledger import UNMATCHED_MODEL, UNMATCHED_NODE
from agentrig.traces import mapping


def _compiles(_config: Any, field: Any, value: str) -> None:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"{field.name} = {value!r} is not a regular expression: {error}") from None


@attrs.frozen(kw_only=True)
class AgentMatchConfig:
    """Settings of `agent-match`."""

    match: str = setting(
        "write",
        help="regular expression, searched in the names of all nodes that enclose a call; empty keeps every call, as "
        "in a run that names no adapter",
        validator=_compiles,
    )
    model: str = setting(
        "",
        help="regular expression, searched in the model's name that the agent sent with a call; empty for any name",
        validator=_compiles,
    )


@attrs.frozen
class AgentMatch:
    """Keeps a call when the name of any node around it matches, and the model's name that the agent sent with it."""

    config: AgentMatchConfig

    def __call__(self, trace: Trace) -> Sequence[Triplet]:
        """Return the triplets of the matching calls, in the order of the calls."""
        kept = []
        for call in trace.llm_calls():
            node = self._node(trace, call)
            triplet = None if node is None or not self._named(call) else triplet_of(call, node=node)
            if triplet is not None:
                kept.append(triplet)
        return kept

    def left_out(self, trace: Trace, call: Span) -> str | None:
        """Return why a call that could be trained is left out; None for one that is kept."""
        if self._node(trace, call) is None:
            return UNMATCHED_NODE
        return None if self._named(call) else UNMATCHED_MODEL

    def _named(self, call: Span) -> bool:
        """Whether the name of the model that the agent sent matches."""
        name = mapping(call.attributes.get("request")).get("model")
        return not self.config.model or bool(re.search(self.config.model, str(name or "")))

    def _node(self, trace: Trace, call: Span) -> str | None:
        """Return the node that matches, or None; with an empty `match` the innermost, or an empty string."""
        nodes = trace.nodes(call)
        if not self.config.match:
            return nodes[0] if nodes else ""
        pattern = re.compile(self.config.match)
        return next((n for n in nodes if pattern.search(n)), None)


@hookimpl
def register_adapters() -> Iterable[AdapterSpec]:
    """Register `agent-match`."""
    yield AdapterSpec(
        name="agent-match",
        summary="Trains the LLM calls whose node's name, and whose model's name, match.",
        config=AgentMatchConfig,
        build=AgentMatch,
    )
