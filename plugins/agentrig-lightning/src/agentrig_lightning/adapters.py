"""A `TraceAdapter` as an adapter: its triplets, with the calls that they came from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrig.adapters import Adapter, Triplet
from agentrig.plugins.specs import AdapterSpec
from agentrig.traces import Trace


def adapter(cls: Callable[[], Any], *, name: str, summary: str) -> AdapterSpec:
    """Return the spec of a `TraceAdapter` whose `adapt` gives triplets with token ids."""

    def build(config: Any) -> Any:
        return _AdapterCall(cls())

    return AdapterSpec(name=name, summary=summary, build=build)


class _AdapterCall:
    """Makes a `TraceAdapter` callable as `adapter(trace)`."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, trace: Trace) -> Sequence[Triplet]:
        """Return the triplets; an empty trace is not passed to the adapter, which would raise."""
        from agentrig_lightning.spans import to_lightning

        if not trace.llm_calls():
            return ()
        found: list[Triplet] = []
        taken: set[str] = set()
        for triplet in self.inner.adapt(to_lightning(trace, trace.rollout_id, f"{trace.rollout_id}-0")):
            prompt, response = _ids(triplet.prompt), _ids(triplet.response)
            if not prompt or not response:
                continue
            call = next(
                (
                    c
                    for c in trace.llm_calls()
                    if c.id not in taken
                    and list(c.attributes.get("response_token_ids", ())) == list(response)
                    and list(c.attributes.get("prompt_token_ids", ())) == list(prompt)
                ),
                None,
            )
            taken.update({call.id} if call is not None else ())
            logprobs = call.attributes.get("response_logprobs") if call is not None else None
            found.append(
                Triplet(
                    prompt_ids=tuple(prompt),
                    response_ids=tuple(response),
                    logprobs=tuple(logprobs) if logprobs else None,
                    reward=triplet.reward,
                    node=str(triplet.metadata.get("agent_name") or ""),
                    span_id=call.id if call is not None else "",
                )
            )
        return found


def trace_adapter(adapter: Adapter) -> Any:
    """Return the `TraceAdapter` of a run's adapter: the user's own, or one that wraps an adapter of agentrig."""
    from agentrig_lightning.recorder_tracer import SpanAdapter

    return adapter.inner if isinstance(adapter, _AdapterCall) else SpanAdapter(adapter)


def _ids(part: Any) -> Sequence[int]:
    return part.get("token_ids") or () if isinstance(part, Mapping) else ()
