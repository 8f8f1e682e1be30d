"""What an update is made from: one trained call each."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from agentrig.ledger import Call


@attrs.frozen(kw_only=True)
class TrainSample:
    """One trained LLM call.

    Attributes:
        prompt_ids: Token ids.
        response_ids: Token ids.
        logprobs: Of the response under the policy that sampled it; None to compute them.
        advantage: Its rollout's.
        rollout: Which rollout it belongs to.
        group: Which group that belongs to.
        call: Which recorded call it is, for the ledger; None if it is none.
    """

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    logprobs: Sequence[float] | None
    advantage: float
    rollout: int
    group: str
    call: Call | None = None
