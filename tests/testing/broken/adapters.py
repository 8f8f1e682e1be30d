"""Adapters that lack one property each; `fine` has all."""

from __future__ import annotations

import attrs

from agentrig import AdapterSpec, Triplet, hookimpl
from agentrig.adapters import triplet_of

MADE: list[int] = []


def fine(trace):
    return [t for t in (triplet_of(call) for call in trace.llm_calls()) if t is not None]


class Nothing:
    """Keeps nothing, for a reason."""

    def __call__(self, trace):
        return []

    def left_out(self, trace, call):
        return "unmatched-node"


def trusts(trace):
    """Keep failed calls too."""
    names = {"prompt_ids": "prompt_token_ids", "response_ids": "response_token_ids", "logprobs": "response_logprobs"}
    calls = [s for s in trace.spans if s.attributes.get("response_token_ids")]
    return [Triplet(span_id=c.id, **{k: c.attributes[name] for k, name in names.items()}) for c in calls]


def counts(trace):
    MADE.append(1)
    return [attrs.evolve(t, node=f"node-{len(MADE)}") for t in fine(trace)]


def pops(trace):
    found = fine(trace)
    for call in trace.llm_calls():
        call.attributes.pop("response_logprobs", None)
    return found


BROKEN = {
    "triplets-empty": lambda trace: [fine(trace)[0], *fine(trace)[1:]],
    "triplets": lambda trace: [(t.prompt_ids, t.response_ids) for t in fine(trace)],
    "keeps-some": Nothing(),
    "exact-tokens": lambda trace: [
        attrs.evolve(t, response_ids=t.response_ids[:-1], logprobs=None) for t in fine(trace)
    ],
    "exact-tokens-logprobs": lambda trace: [attrs.evolve(t, logprobs=(*t.logprobs[1:], 0.0)) for t in fine(trace)],
    "once": lambda trace: [t for t in fine(trace) for _ in "12"],
    "failed-calls": trusts,
    "accounts": lambda trace: fine(trace)[-1:],
    "same-twice": counts,
    "same-twice-there": lambda trace: [attrs.evolve(t, node=min(map(str, range(1000)), key=hash)) for t in fine(trace)],
    "leaves-trace": pops,
}
"""By the check that catches it."""


@hookimpl
def register_adapters():
    yield AdapterSpec(name="fine", summary="Fine.", build=lambda config: fine)
    yield AdapterSpec(name="loads", summary="Broken.", build=lambda config: 1 / 0)
    for name, adapter in BROKEN.items():
        yield AdapterSpec(name=name, summary="Broken.", build=lambda config, adapter=adapter: adapter)
