"""A pytest plugin: every span that Agent Lightning's own tests give to an adapter goes through agentrig and back first.

`python -m pytest -p there_and_back UPSTREAM/tests/adapter` runs them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import agentrig_lightning  # noqa: F401  (before Agent Lightning, which then comes without litellm)

from agentrig.run.rows import _span
from agentrig.traces import Span, Trace

# isort: split
from agentlightning.adapter import LlmProxyTraceToTriplet, TraceToMessages
from agentlightning.adapter.triplet import TraceTree
from agentrig_lightning.spans import from_lightning, to_lightning

converted = 0


def there_and_back(spans: Sequence[Any]) -> list[Any]:
    """Return spans after the way through a trace and its row in the run directory."""
    global converted
    if not spans:
        return []
    converted += len(spans)
    first = spans[0]
    row = json.dumps([_span(s) for s in from_lightning(first.rollout_id, spans).spans])
    trace = Trace(rollout_id=first.rollout_id, spans=tuple(Span(**s) for s in json.loads(row)))
    return to_lightning(trace, first.rollout_id, first.attempt_id)


def _through(cls: Any, name: str) -> None:
    method = getattr(cls, name)

    def changed(self: Any, source: Sequence[Any], /) -> Any:
        return method(self, there_and_back(source))

    setattr(cls, name, changed)


_through(LlmProxyTraceToTriplet, "adapt")
_through(TraceToMessages, "adapt")
_from_spans = TraceTree.from_spans.__func__  # type: ignore[attr-defined]
TraceTree.from_spans = classmethod(lambda cls, spans: _from_spans(cls, there_and_back(spans)))  # type: ignore[assignment]


def pytest_sessionfinish() -> None:
    """Say how many spans were converted: none would prove nothing."""
    print(f"\nspans there and back: {converted}")
