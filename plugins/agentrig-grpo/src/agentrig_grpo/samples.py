"""What an update is made from: one trained call each."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from agentrig.errors import RunStopped
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
        proximal: With stale rollouts: log-probabilities of the response under the weights that the step began with;
            None where the update's own pass gives them.
    """

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    logprobs: Sequence[float] | None
    advantage: float
    rollout: int
    group: str
    call: Call | None = None
    proximal: Sequence[float] | None = None


def check_recorded(samples: Sequence[TrainSample], step: int) -> None:
    """Check that the server gave log-probabilities with all samples: those of older weights can't be computed again.

    Raises:
        RunStopped: It did not.
    """
    lacking = sum(s.logprobs is None for s in samples)
    if lacking:
        raise RunStopped(
            f"step {step}: {lacking} of {len(samples)} calls have no log-probabilities. With max_staleness = 1 other "
            "weights than the learner's may have sampled them, and without theirs the importance weights are unknown.\n"
            "  Use a server that returns `logprobs`, or set algorithm.max_staleness = 0",
            cause="stale-rollouts",
        )
