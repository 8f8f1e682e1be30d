"""Entries of the ledger: an algorithm reports at the end of a step what it did with each LLM call.

A run also counts the calls itself, from the traces. `agentrig.run.ledger` compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import attrs

Place = Literal["trained", "masked", "dropped"]

CALL_ERROR = "call-error"
OTHER_SERVER = "other-server"
NO_TOKEN_IDS = "no-token-ids"
FAILED_ROLLOUT = "failed-rollout"
UNMATCHED_NODE = "unmatched-node"
UNMATCHED_MODEL = "unmatched-model"
DUPLICATE = "duplicate"
LEFT_OUT_BY_ADAPTER = "left-out-by-adapter"
ZERO_VARIANCE = "zero-variance-group"
ALONE = "alone-in-group"
ZERO_ADVANTAGE = "zero-advantage"
NEGATIVE_SCALE = "negative-scale-zero"
LEFT_OUT_BY_SAMPLES = "left-out-by-samples"
NOT_FINITE = "gradient-not-finite"
CRITIC_WARMUP = "critic-warmup"

REASONS: Mapping[str, str] = {
    CALL_ERROR: "the call failed, or its stream broke off",
    OTHER_SERVER: "another server than the run's answered: its tokens are from another model",
    NO_TOKEN_IDS: "the server returned no token ids",
    FAILED_ROLLOUT: "the rollout failed: there is no reward to learn from",
    UNMATCHED_NODE: "the adapter trains other graph nodes",
    UNMATCHED_MODEL: "the adapter trains calls that name other models",
    DUPLICATE: "the call was recorded twice; the other record counts",
    LEFT_OUT_BY_ADAPTER: "the adapter left it out and does not say why (it has no method `left_out`)",
    ZERO_VARIANCE: "all rollouts of its group got the same reward: the advantage is 0",
    ALONE: "its group has no other rollout to compare with: the advantage is 0",
    ZERO_ADVANTAGE: "its rollout's reward equals the baseline of its group: the advantage is 0",
    NEGATIVE_SCALE: "its rollout's reward is below the baseline of its group, and `negative_scale` is 0",
    LEFT_OUT_BY_SAMPLES: "the algorithm's own method `samples` left it out",
    NOT_FINITE: "the gradient was NaN or infinite, and the update was skipped",
    CRITIC_WARMUP: "only the critic was trained in this step",
}
"""Why a call was dropped, by reason. An algorithm or adapter of your own may add reasons: lower case, with hyphens."""


class Call(NamedTuple):
    """Which LLM call: a rollout's id, and the id of the call's span in its trace."""

    rollout: str
    span: str


@attrs.frozen
class Entry:
    """What an algorithm did with response tokens of a call.

    A call may have several entries, for example one for its trained and one for its masked tokens. Together they
    must have exactly the tokens that were sampled. A call that is trained in several epochs has one entry.

    Attributes:
        call: Which call.
        place: `trained`: the tokens are in a loss that changed the weights. `masked`: they were in a sequence as
            context, without loss. `dropped`: they were left out.
        tokens: Number of response tokens.
        reason: Why it was dropped (see `REASONS`); empty for the other places.
        advantage: The advantage that the tokens were trained with; None if it is not one number, or not known. It is
            only shown.
    """

    call: Call
    place: Place
    tokens: int
    reason: str = ""
    advantage: float | None = None


def without_gradient(values: Sequence[float | None], value: float | None, *, negative_scale: float = 1.0) -> str:
    """Return why a rollout has the advantage 0 in its group.

    Args:
        values: The values of the group's rollouts that count in its baseline; None for a failure.
        value: The rollout's own value.
        negative_scale: The factor of negative advantages.
    """
    valid = [v for v in values if v is not None]
    if len(valid) < 2:
        return ALONE
    if min(valid) == max(valid):
        return ZERO_VARIANCE
    worse = value is not None and value < sum(valid) / len(valid)
    return NEGATIVE_SCALE if worse and not negative_scale else ZERO_ADVANTAGE


__all__ = ["REASONS", "Call", "Entry", "Place", "without_gradient"]
