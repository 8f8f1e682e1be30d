"""Counts what an update did with each sample, where the loss is computed, for the entries of the ledger."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

import torch  # noqa: TID253  (imported by the learner)

from agentrig.ledger import ZERO_ADVANTAGE, Call, Entry, without_gradient
from agentrig_grpo.loss import TokenLoss


def tokens_in_loss(logprobs: torch.Tensor, out: TokenLoss, advantages: torch.Tensor) -> torch.Tensor:
    """Return which tokens contribute to the gradient, after `backward`, [T].

    The gradient by a token's loss is the token's actual weight in the total loss. It is 0 if a mask or a factor removed
    the token there. The gradient by its log-probability is 0 if a mask or a factor removed it inside the loss. It is
    also 0 if the ratio is clipped or 0, or the importance weight of a stale token is 0, which counts as trained. With
    advantage 0 only the KL loss has a gradient, which is 0 as long as the policy equals the reference.

    Args:
        logprobs: The tokens' log-probabilities; they and `out.loss` retain their gradients.
        out: The tokens' loss.
        advantages: The advantage of each token's rollout, [T].
    """
    if out.loss.grad is None or logprobs.grad is None:  # no gradient came from these tokens
        return torch.zeros_like(advantages, dtype=torch.bool)
    policy = (logprobs.grad != 0) | (out.clipped != 0) | (out.ratio == 0)
    if out.rollout_is is not None:
        policy = policy | (out.rollout_is == 0)
    return (out.loss.grad != 0) & torch.where(advantages != 0, policy, out.kl_reference is not None)


class Used:
    """What an update did with each of a step's samples.

    Args:
        samples: Number of samples.

    Attributes:
        reasons: Index of a sample to why it was not trained in some epoch.
    """

    def __init__(self, samples: int) -> None:
        self._epochs: list[list[int]] = []
        self._now = [0] * samples
        self.reasons: dict[int, str] = {}

    def train(self, places: Sequence[int], tokens: Sequence[int]) -> None:
        """Count tokens whose gradient changed the weights."""
        for place, n in zip(places, tokens, strict=True):
            self._now[place] += n

    def drop(self, places: Sequence[int], reason: str) -> None:
        """Record samples that the current epoch does not train."""
        self.reasons.update(dict.fromkeys(places, reason))

    def end_epoch(self) -> None:
        """Start the next epoch's counts."""
        self._epochs.append(self._now)
        self._now = [0] * len(self._now)

    def tokens(self, place: int, expected: int) -> int:
        """Return a sample's number of trained tokens in the epoch where it differs most from the expected number."""
        return max((epoch[place] for epoch in self._epochs), key=lambda n: abs(n - expected), default=0)


class Identified(Protocol):
    """A sample with the id of its call (an `agentrig_grpo.samples.TrainSample` is one)."""

    @property
    def call(self) -> Call | None:
        """The call; None for a sample without an entry in the ledger."""
        ...

    @property
    def response_ids(self) -> Sequence[int]:
        """Token ids of the response."""
        ...

    @property
    def advantage(self) -> float:
        """The advantage of its rollout."""
        ...

    @property
    def rollout(self) -> int:
        """The index of its rollout."""
        ...

    @property
    def group(self) -> str:
        """The group of its rollout."""
        ...


def entries_of(
    samples: Sequence[Identified],
    used: Used,
    *,
    values: Sequence[float | None],
    groups: Sequence[str],
    negative_scale: float,
) -> list[Entry]:
    """Return the ledger's entries of a step.

    Args:
        samples: The samples of the update, each with its `call`.
        used: What the update did with them.
        values: The value of each rollout; None for a failure.
        groups: The group of each rollout.
        negative_scale: The factor of negative advantages.
    """
    members: dict[str, list[float | None]] = defaultdict(list)
    for group, value in zip(groups, values, strict=True):
        members[group].append(value)
    found = []
    for place, sample in enumerate(samples):
        if sample.call is None:
            continue
        expected = len(sample.response_ids)
        reason = used.reasons.get(place)
        trained = used.tokens(place, 0 if reason else expected)
        if trained:
            found.append(Entry(sample.call, "trained", trained, advantage=sample.advantage))
        elif reason:
            if reason == ZERO_ADVANTAGE:
                others, value = members[sample.group], values[sample.rollout]
                reason = without_gradient(others, value, negative_scale=negative_scale)
            found.append(Entry(sample.call, "dropped", expected, reason, sample.advantage))
    return found
