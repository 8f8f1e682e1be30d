"""A `TraceAdapter` as an adapter: its triplets, with the calls that they came from."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrig.adapters import Adapter, Triplet
from agentrig.errors import AgentrigError, place_of
from agentrig.plugins.specs import AdapterSpec
from agentrig.text import words_of
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

        calls = list(trace.llm_calls())
        if not calls:
            return ()
        found: list[Triplet] = []
        for triplet in self.inner.adapt(to_lightning(trace, trace.rollout_id, f"{trace.rollout_id}-0")):
            prompt, response = _ids(triplet.prompt), _ids(triplet.response)
            if not prompt or not response:
                continue
            ids = {"prompt_token_ids": list(prompt), "response_token_ids": list(response)}
            same = (c for c in calls if all(list(c.attributes.get(key, ())) == ids[key] for key in ids))
            call = next(same, None)
            if call is not None:
                calls.remove(call)
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


def watched(adapter: Any, *, name: str) -> Any:
    """Return a copy of a `TraceAdapter` for an algorithm: its `gave_triplets` says whether that learns from triplets.

    It raises `AgentrigError` where the adapter raises.
    """
    from agentlightning import Triplet
    from agentlightning.adapter import TraceToTripletBase

    from agentrig_lightning.recorder_tracer import SpanAdapter

    made = copy.copy(adapter)
    makes_triplets = isinstance(adapter, SpanAdapter | TraceToTripletBase)

    def adapt(source: Any, /) -> Any:
        try:
            found = adapter.adapt(source)
        except AgentrigError:
            raise
        except Exception as error:
            raise AgentrigError(f"the adapter {name} raised {words_of(error)}{place_of(error)}") from error
        if makes_triplets or any(isinstance(f, Triplet) for f in found):
            made.gave_triplets = True
        return found

    made.adapt, made.gave_triplets = adapt, False
    return made


def _ids(part: Any) -> Sequence[int]:
    return part.get("token_ids") or () if isinstance(part, Mapping) else ()
