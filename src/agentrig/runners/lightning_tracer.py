"""Agent Lightning's tracer and adapter interfaces, on top of agentrig's recorder and adapters."""

from __future__ import annotations

import time
from typing import Any

from agentrig.adapters import Adapter
from agentrig.lightning_import import import_lightning
from agentrig.tracing.recorder import current, plain

import_lightning()  # before the imports below, which would bring litellm and its network calls

from agentlightning import Span as LightningSpan  # noqa: E402, TID253  (this module is itself imported lazily)
from agentlightning import Triplet  # noqa: E402, TID253
from agentlightning.adapter import TraceAdapter  # noqa: E402, TID253
from agentlightning.tracer import Tracer  # noqa: E402, TID253
from agentlightning.types import SpanCoreFields, TraceStatus  # noqa: E402, TID253

from agentrig.runners.lightning_spans import final_reward, from_lightning, to_lightning  # noqa: E402


class RecorderTracer(Tracer):
    """Agent Lightning's tracer interface, on top of the recorder of the current rollout.

    `emit_reward` and similar functions find it as the active tracer. LangChain needs no handler from it, because
    the recorder attaches its own; callers that require one get a handler that does nothing.
    """

    def create_span(
        self, name: str, attributes: Any = None, timestamp: float | None = None, status: Any = None
    ) -> SpanCoreFields:
        """Record a finished span."""
        now = timestamp or time.time()
        recorder = current()
        if recorder is not None:
            recorder.add(name, now, {str(k): plain(v) for k, v in dict(attributes or {}).items()})
        return SpanCoreFields(
            name=name,
            attributes=dict(attributes or {}),
            start_time=now,
            end_time=now,
            status=status or TraceStatus(status_code="OK"),
        )

    def get_langchain_handler(self) -> Any:
        """Return a handler that does nothing."""
        from langchain_core.callbacks.base import BaseCallbackHandler

        return BaseCallbackHandler()

    def get_last_trace(self) -> list[LightningSpan]:
        """Return the spans of the current rollout so far."""
        recorder = current()
        return to_lightning(recorder.trace(), recorder.rollout_id, "0") if recorder is not None else []


class SpanAdapter(TraceAdapter[Any]):
    """Agent Lightning's adapter interface, on top of an agentrig adapter."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter

    def adapt(self, source: Any, /) -> list[Triplet]:
        """Return the triplets of spans, with the reward that is stored among them."""
        spans = list(source)
        reward = final_reward(spans)
        trace = from_lightning(spans[0].rollout_id if spans else "", spans)
        return [
            Triplet(
                prompt={"token_ids": list(t.prompt_ids)},
                response={"token_ids": list(t.response_ids)},
                reward=reward,
                metadata={"agent_name": t.node, "response_id": t.span_id},
            )
            for t in self._adapter(trace)
        ]
