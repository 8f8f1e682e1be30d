"""The adapter `agent-match`: trains the LLM calls made under graph nodes whose name matches."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from agentrig import AdapterSpec, Trace, Triplet, hookimpl, setting
from agentrig.adapters import triplet_of


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
        pattern = re.compile(self.config.match)
        kept = []
        for call in trace.llm_calls():
            nodes = trace.nodes(call)
            matched = next((n for n in nodes if pattern.search(n)), None)
            if self.config.match and matched is None:
                continue
            triplet = triplet_of(call, node=matched or (nodes[0] if nodes else ""))
            if triplet is not None:
                kept.append(triplet)
        return kept


@hookimpl
def register_adapters() -> Iterable[AdapterSpec]:
    """Bring `agent-match`."""
    yield AdapterSpec(
        name="agent-match",
        summary="Trains the LLM calls made under graph nodes whose name matches.",
        config=AgentMatchConfig,
        build=AgentMatch,
    )
