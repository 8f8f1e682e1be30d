"""Adapters: from a trace to the LLM calls that are trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from agentrig.traces import Span, Trace


@attrs.frozen(kw_only=True)
class Triplet:
    """One LLM call that is trained on, exactly as the model saw and sampled it.

    Attributes:
        prompt_ids: Token ids of the prompt, chat template applied.
        response_ids: Token ids that were sampled.
        logprobs: Log-probability of each response token under the sampling policy, at the sampling
            temperature; None when the endpoint did not return them.
        reward: The rollout's reward; None until the reward has been computed. If an agent of Agent Lightning scores
            its own calls, the reward that the adapter matched to this call.
        node: The graph node that the adapter matched the call to, or the innermost node.
        span_id: The call's span.
    """

    prompt_ids: Sequence[int] = attrs.field(repr=False)
    response_ids: Sequence[int] = attrs.field(repr=False)
    logprobs: Sequence[float] | None = attrs.field(default=None, repr=False)
    reward: float | None = None
    node: str = ""
    span_id: str = ""


Adapter = Callable[[Trace], Sequence[Triplet]]
"""What `AdapterSpec.build` returns: called as `adapter(trace)`; an empty trace gives no triplets.

It may also have a method `left_out(trace, call)`, which returns why it keeps no triplet of an LLM call (a reason, see
`agentrig.ledger`), or None for a call that it keeps. With it, a run notices when the adapter loses a call.
"""


def identified(triplets: Sequence[Triplet], trace: Trace) -> list[Triplet]:
    """Return triplets with their calls' spans: one without gets the first call with its tokens that is still free.

    They are plain ones, read once: those of an adapter may be of a class whose fields change.
    """
    triplets = [_plain(triplet) for triplet in triplets]
    taken = {t.span_id for t in triplets}
    found = []
    for triplet in triplets:
        if not triplet.span_id:
            free = (c for c in trace.llm_calls() if c.id not in taken and same_tokens(c, triplet))
            call = next(free, None)
            if call is not None:
                triplet = attrs.evolve(triplet, span_id=call.id)
                taken.add(call.id)
        found.append(triplet)
    return found


def _plain(triplet: Triplet) -> Triplet:
    logprobs = triplet.logprobs
    return Triplet(
        prompt_ids=tuple(triplet.prompt_ids),
        response_ids=tuple(triplet.response_ids),
        logprobs=None if logprobs is None else tuple(logprobs),
        reward=triplet.reward,
        node=triplet.node,
        span_id=triplet.span_id,
    )


def same_tokens(call: Span, triplet: Triplet) -> bool:
    """Return whether a triplet has exactly the token ids that were recorded of a call."""
    recorded = call.attributes
    return tuple(recorded.get("response_token_ids") or ()) == tuple(triplet.response_ids) and tuple(
        recorded.get("prompt_token_ids") or ()
    ) == tuple(triplet.prompt_ids)


def triplet_of(call: Span, *, node: str = "") -> Triplet | None:
    """Return a call's triplet, or None when it failed or its endpoint returned no token ids."""
    if call.error is not None:  # the stream broke: the response is incomplete
        return None
    attributes = call.attributes
    prompt, response = attributes.get("prompt_token_ids"), attributes.get("response_token_ids")
    if not prompt or not response:
        return None
    logprobs = attributes.get("response_logprobs")
    return Triplet(
        prompt_ids=tuple(prompt),
        response_ids=tuple(response),
        logprobs=tuple(logprobs) if logprobs and len(logprobs) == len(response) else None,
        node=node,
        span_id=call.id,
    )
