"""The adapter `last-calls`: trains the last calls of a rollout, whatever their node is called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from agentrig import AdapterSpec, Span, Trace, Triplet, hookimpl, setting
from agentrig.adapters import triplet_of


@attrs.frozen(kw_only=True)
class Config:
    """The settings: `[adapter]` of a run file."""

    calls: int = setting(1, help="how many calls of a rollout are trained, from its end", ge=1)


@attrs.frozen
class LastCalls:
    """What `build` returns. It returns at most one triplet for each call, with exactly the recorded token ids."""

    config: Config

    def __call__(self, trace: Trace) -> Sequence[Triplet]:
        """Return the triplets of the last calls, in the order of the calls."""
        nodes = ((call, trace.nodes(call)) for call in self._kept(trace))
        triplets = [triplet_of(call, node=names[0] if names else "") for call, names in nodes]
        return [t for t in triplets if t is not None]

    def left_out(self, trace: Trace, call: Span) -> str | None:
        """Return why a call is not trained; None for one that is. With it, a run notices when a call gets lost."""
        return None if call.id in {kept.id for kept in self._kept(trace)} else "an-earlier-call"

    def _kept(self, trace: Trace) -> Sequence[Span]:
        """Return the last calls among those that have token ids."""
        return [call for call in trace.llm_calls() if triplet_of(call) is not None][-self.config.calls :]


@hookimpl
def register_adapters() -> Iterable[AdapterSpec]:
    """Register `last-calls`."""
    yield AdapterSpec(name="last-calls", summary="Trains the last calls of a rollout.", config=Config, build=LastCalls)
