"""Raw OpenTelemetry spans: those that an agent makes during a rollout go into its trace."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider

from agentrig.tracing.recorder import Recorder, current
from agentrig_lightning.spans import as_span, from_lightning

_installed = False


def install() -> None:
    """Record OpenTelemetry's spans in rollouts, once per process; a provider that is already there is used."""
    global _installed
    if _installed:
        return
    _installed = True
    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        provider = TracerProvider()
        trace.set_tracer_provider(provider)
    provider.add_span_processor(_Processor())
    Recorder.outside = staticmethod(_current)  # type: ignore[method-assign]


def _current() -> str | None:
    found = trace.get_current_span().get_span_context().span_id
    return trace.format_span_id(found) if found else None


class _Processor(SpanProcessor):
    """Sends spans to the rollout in which they were started."""

    def __init__(self) -> None:
        self._recorders: WeakValueDictionary[str, Recorder] = WeakValueDictionary()

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        recorder = current()
        if recorder is None or recorder.muted:
            return
        span_id = trace.format_span_id(span.get_span_context().span_id)
        given = trace.format_span_id(span.parent.span_id) if span.parent is not None else None
        parent = given if given is not None and given != _current() and recorder.is_open(given) else recorder.parent()
        self._recorders[span_id] = recorder
        recorder.open(span_id, parent, span.name, {}, current=False)

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        recorder = self._recorders.pop(trace.format_span_id(context.span_id), None) if context is not None else None
        if recorder is not None:
            seen = as_span(span, recorder.rollout_id)
            recorder.keep(from_lightning(recorder.rollout_id, [seen]).spans[0])
