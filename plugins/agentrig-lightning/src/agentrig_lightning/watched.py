"""The adapter that an algorithm of Agent Lightning gets: notes what was asked of it, and names itself in errors."""

from __future__ import annotations

import copy
from typing import Any

from agentrig.errors import AgentrigError, place_of
from agentrig.text import words_of


class WatchedAdapter:
    """A `TraceAdapter` for an algorithm, with the run's own one left as it is.

    Args:
        adapter: The `TraceAdapter`.
        name: How messages name it.

    Attributes:
        adapter: A copy, of the same class, for the algorithm. It raises `AgentrigError` where the adapter raises.
        gave_triplets: Whether the algorithm has asked for triplets: it learns from them.
    """

    def __init__(self, adapter: Any, *, name: str) -> None:
        self.adapter: Any = copy.copy(adapter)
        self.gave_triplets = False
        self._name, self._adapt = name, adapter.adapt
        self.adapter.adapt = self._watched

    def _watched(self, source: Any, /) -> Any:
        from agentlightning import Triplet
        from agentlightning.adapter import TraceToTripletBase

        from agentrig_lightning.recorder_tracer import SpanAdapter

        try:
            found = self._adapt(source)
        except AgentrigError:
            raise
        except Exception as error:
            raise AgentrigError(f"the adapter {self._name} raised {words_of(error)}{place_of(error)}") from error
        if isinstance(self.adapter, SpanAdapter | TraceToTripletBase) or any(isinstance(f, Triplet) for f in found):
            self.gave_triplets = True
        return found
