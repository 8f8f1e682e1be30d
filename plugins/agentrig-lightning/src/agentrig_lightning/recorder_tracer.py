"""Agent Lightning's tracer and adapter interfaces, on top of agentrig's recorder and adapters."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

from agentlightning import Span as LightningSpan
from agentlightning import Triplet
from agentlightning.adapter import TraceAdapter
from agentlightning.adapter.triplet import RewardMatchPolicy, TraceTree
from agentlightning.tracer import Tracer
from agentlightning.tracer.dummy import DummySpanRecordingContext
from agentlightning.types import SpanCoreFields, TraceStatus
from opentelemetry import trace as otel
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider

from agentrig.adapters import Adapter, identified
from agentrig.adapters import Triplet as OwnTriplet
from agentrig.tracing.recorder import Recorder, current, reward_number
from agentrig_lightning.spans import as_span, error_of, from_lightning, own_reward, run_score, so_far


class RecorderTracer(Tracer):
    """Agent Lightning's tracer interface, on top of the recorder of the current rollout.

    `emit_reward`, `operation` and similar functions find it as the active tracer. LangChain needs no handler from it,
    because the recorder attaches its own; callers that require one get a handler that does nothing.
    """

    def init_worker(self, worker_id: int, store: Any = None) -> None:
        """Record OpenTelemetry's spans too; call it in the process that runs the agent."""
        super().init_worker(worker_id, store)
        record_opentelemetry()

    def create_span(
        self, name: str, attributes: Any = None, timestamp: float | None = None, status: Any = None
    ) -> SpanCoreFields:
        """Record a finished span; one of `emit_reward` gives its call a reward, as `agentrig.reward` does."""
        now = timestamp or time.time()
        status = status or TraceStatus(status_code="OK")
        kept = dict(attributes or {})
        core = SpanCoreFields(name=name, attributes=kept, start_time=now, end_time=now, status=status)
        recorder = current()
        if recorder is not None:
            given = {key: reward_number(value) for key, value in own_reward(core).items()}
            recorder.add(name, now, {**_values(kept), **given}, error=error_of(status))
        return core

    @contextmanager
    def operation_context(
        self, name: str, attributes: Any = None, start_time: float | None = None, end_time: float | None = None
    ) -> Iterator[DummySpanRecordingContext]:
        """Record what happens inside as a span, and the spans that begin inside as its children."""
        operation = DummySpanRecordingContext(name, dict(attributes or {}), start_time)
        recorder = current()
        span_id = uuid.uuid4().hex[:16]
        if recorder is not None:
            recorder.open(span_id, recorder.parent(), name, {}, start=operation.start_time)
        try:
            yield operation
        except Exception as error:
            operation.record_exception(error)
            raise
        finally:
            operation.finalize(end_time)
            if recorder is not None:
                found = error_of(operation.status)
                recorder.close(span_id, error=found, end=operation.end_time, attributes=_values(operation.attributes))

    def get_langchain_handler(self) -> Any:
        """Return a handler that does nothing."""
        from langchain_core.callbacks.base import BaseCallbackHandler

        return BaseCallbackHandler()

    def get_last_trace(self) -> list[LightningSpan]:
        """Return the spans of the current rollout so far."""
        recorder = current()
        return so_far(recorder, "0") if recorder is not None else []


class SpanAdapter(TraceAdapter[Any]):
    """Agent Lightning's adapter interface, on top of an agentrig adapter.

    The adapter selects the calls. Their triplets are those of Agent Lightning: with the messages, image URLs,
    log-probabilities and the response's id. Rewards are matched to calls as `TracerTraceToTriplet` does by default: a
    reward belongs to the last call before it that has none yet. The score of a run's reward is the last call's.
    """

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter

    def adapt(self, source: Any, /) -> list[Triplet]:
        """Return the triplets of spans."""
        spans = [as_span(span) for span in source]
        if not spans:
            return []
        trace = from_lightning(spans[0].rollout_id, spans)
        kept = identified(self._adapter(trace), trace)
        tree = TraceTree.from_spans(spans)
        nodes = {node.id: node for node in tree.traverse()}
        calls = [nodes[t.span_id] for t in kept if t.span_id in nodes]
        rewards = tree.match_rewards(RewardMatchPolicy.FIRST_OCCURRENCE, calls)
        score = run_score(spans)
        if score is not None and calls:
            rewards[calls[-1].id] = score
        return [_triplet(t, tree, nodes.get(t.span_id), rewards.get(t.span_id)) for t in kept]


def _triplet(ours: OwnTriplet, tree: TraceTree, call: TraceTree | None, reward: float | None) -> Triplet:
    if call is None:  # an adapter of its own, which joins calls
        theirs = Triplet(prompt={}, response={}, reward=reward, metadata={"agent_name": ours.node, "response_id": None})
    else:
        theirs = tree.span_to_triplet(call.span, ours.node)
    return theirs.model_copy(
        update={
            "prompt": {**theirs.prompt, "token_ids": list(ours.prompt_ids)},
            "response": {**theirs.response, "token_ids": list(ours.response_ids)},
            "reward": reward,
        }
    )


def _values(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return OpenTelemetry's attributes as JSON values, complete: they are what the agent wanted to record."""
    return {str(k): list(v) if isinstance(v, tuple) else v for k, v in attributes.items()}


# --- OpenTelemetry's own spans --------------------------------------------------------------------------

_installed = False


def record_opentelemetry() -> None:
    """Record OpenTelemetry's spans in rollouts, once per process; a provider that is already there is used."""
    global _installed
    if _installed:
        return
    _installed = True
    provider = otel.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        provider = TracerProvider()
        otel.set_tracer_provider(provider)
    provider.add_span_processor(_Processor())
    Recorder.outside = staticmethod(_current)  # type: ignore[method-assign]


def _current() -> str | None:
    found = otel.get_current_span().get_span_context().span_id
    return otel.format_span_id(found) if found else None


class _Processor(SpanProcessor):
    """Sends spans to the rollout in which they were started."""

    def __init__(self) -> None:
        self._recorders: WeakValueDictionary[str, Recorder] = WeakValueDictionary()

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        recorder = current()
        if recorder is None or recorder.muted:
            return
        span_id = otel.format_span_id(span.get_span_context().span_id)
        given = otel.format_span_id(span.parent.span_id) if span.parent is not None else None
        parent = given if given is not None and given != _current() and recorder.is_open(given) else recorder.parent()
        self._recorders[span_id] = recorder
        recorder.open(span_id, parent, span.name, {}, current=False)

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        recorder = self._recorders.pop(otel.format_span_id(context.span_id), None) if context is not None else None
        if recorder is not None:
            seen = as_span(span, recorder.rollout_id)
            recorder.keep(from_lightning(recorder.rollout_id, [seen]).spans[0])
