"""Calls that extend an earlier call's tokens become one sequence with a loss mask: fewer tokens, same gradient."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from agentrig import Triplet


@attrs.define
class Segment:
    """Token ids to train on.

    Attributes:
        prompt_ids: The first call's prompt.
        response_ids: Everything after it, tokens of later prompts included.
        mask: One for each of `response_ids`: 1 for sampled tokens, 0 for given ones.
        logprobs: Of the sampled tokens under the sampling policy, 0.0 where the mask is 0; None when unknown.
        pieces: Where each call's tokens are: its span, the place of its first token in `response_ids`, their number.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    pieces: tuple[tuple[str, int, int], ...]

    @property
    def ids(self) -> tuple[int, ...]:
        """All tokens."""
        return self.prompt_ids + self.response_ids


def segment_of(triplet: Triplet) -> Segment:
    """Return one call as a sequence."""
    response = tuple(triplet.response_ids)
    return Segment(
        prompt_ids=tuple(triplet.prompt_ids),
        response_ids=response,
        mask=(1,) * len(response),
        logprobs=None if triplet.logprobs is None else tuple(triplet.logprobs),
        pieces=((triplet.span_id, 0, len(response)),),
    )


def merge(triplets: Sequence[Triplet]) -> list[Segment]:
    """Merge calls into as few sequences as their tokens allow.

    A call is appended to the longest sequence that is an exact prefix of its prompt; otherwise it
    starts a new one. So each sampled token is in exactly one sequence, after the same tokens that the
    model saw, and conversations may run in parallel.

    Args:
        triplets: The trained calls of one rollout, in the order in which they were made.

    Returns:
        Sequences, in the order of their first calls.
    """
    merged: list[Segment] = []
    for triplet in triplets:
        prompt = tuple(triplet.prompt_ids)
        found: Segment | None = None
        for candidate in merged:
            length = len(candidate.prompt_ids) + len(candidate.response_ids)
            longest = 0 if found is None else len(found.ids)
            if longest < length <= len(prompt) and candidate.ids == prompt[:length]:
                found = candidate
        if found is None:
            merged.append(segment_of(triplet))
        else:
            _extend(found, triplet, prompt[len(found.ids) :])
    return merged


def _extend(sequence: Segment, triplet: Triplet, given: tuple[int, ...]) -> None:
    response = tuple(triplet.response_ids)
    if sequence.logprobs is not None and triplet.logprobs is not None:
        sequence.logprobs = sequence.logprobs + (0.0,) * len(given) + tuple(triplet.logprobs)
    else:
        sequence.logprobs = None
    start = len(sequence.response_ids) + len(given)
    sequence.pieces = (*sequence.pieces, (triplet.span_id, start, len(response)))
    sequence.response_ids = sequence.response_ids + given + response
    sequence.mask = sequence.mask + (0,) * len(given) + (1,) * len(response)
