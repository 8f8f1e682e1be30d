"""Adapters that lack one property each; `fine` has all."""

from __future__ import annotations

import attrs

from agentrig import AdapterSpec, Triplet, hookimpl
from agentrig.adapters import triplet_of

MADE: list[int] = []


def fine(trace):
    """Keep every call."""
    return [t for t in (triplet_of(call) for call in trace.llm_calls()) if t is not None]


def needs_a_call(trace):
    return [fine(trace)[0], *fine(trace)[1:]]


def pairs(trace):
    return [(t.prompt_ids, t.response_ids) for t in fine(trace)]


class Nothing:
    """Keeps nothing, for a reason."""

    def __call__(self, trace):
        """Return no triplets."""
        return []

    def left_out(self, trace, call):
        """Return why."""
        return "unmatched-node"


def cuts(trace):
    return [attrs.evolve(t, response_ids=t.response_ids[:-1], logprobs=None) for t in fine(trace)]


def shifts(trace):
    return [attrs.evolve(t, logprobs=(*t.logprobs[1:], 0.0)) for t in fine(trace)]


def doubles(trace):
    return [t for t in fine(trace) for _ in "12"]


def trusts(trace):
    calls = [s for s in trace.spans if s.attributes.get("response_token_ids")]
    return [
        Triplet(
            prompt_ids=c.attributes["prompt_token_ids"],
            response_ids=c.attributes["response_token_ids"],
            logprobs=c.attributes["response_logprobs"],
            span_id=c.id,
        )
        for c in calls
    ]


def last_only(trace):
    return fine(trace)[-1:]


def counts(trace):
    MADE.append(1)
    return [attrs.evolve(t, node=f"node-{len(MADE)}") for t in fine(trace)]


def by_hash(trace):
    return [attrs.evolve(t, node=min(map(str, range(1000)), key=hash)) for t in fine(trace)]


def pops(trace):
    found = fine(trace)
    for call in trace.llm_calls():
        call.attributes.pop("response_logprobs", None)
    return found


def cannot_be_built(config):
    raise RuntimeError("no pattern was given")


BROKEN = {
    "empty": needs_a_call,
    "triplets": pairs,
    "keeps-some": Nothing(),
    "exact-tokens": cuts,
    "logprobs": shifts,
    "once": doubles,
    "failed-calls": trusts,
    "accounts": last_only,
    "same-twice": counts,
    "other-process": by_hash,
    "leaves-trace": pops,
}
"""By the check that catches it."""


@hookimpl
def register_adapters():
    yield AdapterSpec(name="fine", summary="Fine.", build=lambda config: fine)
    yield AdapterSpec(name="loads", summary="Broken.", build=cannot_be_built)
    for name, adapter in BROKEN.items():
        yield AdapterSpec(name=name, summary="Broken.", build=lambda config, adapter=adapter: adapter)
