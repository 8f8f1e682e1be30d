"""The adapter `agent-match`: trains the LLM calls made under graph nodes whose name matches."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from agentrig import AdapterSpec, Span, Trace, Triplet, hookimpl, setting
from agentrig.adapters import triplet_of
from agentrig.ledger import UNMATCHED_NODE


def _compiles(_config: Any, _field: Any, value: str) -> None:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"match = {value!r} is not a regular expression: {error}") from None


@attrs.frozen(kw_only=True)
class AgentMatchConfig:
    """Settings of `agent-match`."""

    match: str = setting(
        "write",
        help="regular expression, searched in the names of all nodes that enclose a call; empty keeps every call",
        validator=_compiles,
    )


@attrs.frozen
class AgentMatch:
    """Keeps a call when the name of any node around it matches."""

    config: AgentMatchConfig

    def __call__(self, trace: Trace) -> Sequence[Triplet]:
        """Return the triplets of the matching calls, in the order of the calls."""
        kept = []
        for call in trace.llm_calls():
            node = self._node(trace, call)
            triplet = None if node is None else triplet_of(call, node=node)
            if triplet is not None:
                kept.append(triplet)
        return kept

    def left_out(self, trace: Trace, call: Span) -> str | None:
        """Return why a call that could be trained is left out; None for one that is kept."""
        return UNMATCHED_NODE if self._node(trace, call) is None else None

    def _node(self, trace: Trace, call: Span) -> str | None:
        """Return the node that matches, or None; with an empty `match` the innermost, or an empty string."""
        nodes = trace.nodes(call)
        if not self.config.match:
            return nodes[0] if nodes else ""
        pattern = re.compile(self.config.match)
        return next((n for n in nodes if pattern.search(n)), None)


@hookimpl
def register_adapters() -> Iterable[AdapterSpec]:
    """Bring `agent-match`."""
    yield AdapterSpec(
        name="agent-match",
        summary="Trains the LLM calls made under graph nodes whose name matches.",
        config=AgentMatchConfig,
        build=AgentMatch,
    )
