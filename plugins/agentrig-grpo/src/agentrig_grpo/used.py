"""What an update did with each sample, counted where the loss is computed; it becomes the entries of the ledger."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

import torch  # noqa: TID253  (imported by the learner)

from agentrig.ledger import ZERO_ADVANTAGE, Call, Entry, without_gradient
from agentrig_grpo.loss import TokenLoss


def tokens_in_loss(logprobs: torch.Tensor, out: TokenLoss, advantages: torch.Tensor) -> torch.Tensor:
    """Return which tokens the gradient came from, after `backward`, [T].

    The gradient by a token's loss is the weight that the token really has in the total loss. It is 0 if a mask or a
    factor removed the token there. The gradient by its log-probability is 0 if one removed it inside the loss; but also
    where the ratio was clipped, or is 0, which counts as trained. With the advantage 0 only the KL loss has a gradient,
    which is 0 wherever the policy is still the reference.

    Args:
        logprobs: The tokens' log-probabilities; they and `out.loss` retain their gradients.
        out: The tokens' loss.
        advantages: Of each token's rollout, [T].
    """
    if out.loss.grad is None or logprobs.grad is None:  # no gradient came from these tokens
        return torch.zeros_like(advantages, dtype=torch.bool)
    policy = (logprobs.grad != 0) | (out.clipped != 0) | (out.ratio == 0)
    return (out.loss.grad != 0) & torch.where(advantages != 0, policy, out.kl_reference is not None)


class Used:
    """What an update did with each of a step's samples.

    Args:
        samples: How many there are.

    Attributes:
        reasons: Why a sample was not trained in some epoch, by its place.
    """

    def __init__(self, samples: int) -> None:
        self._epochs: list[list[int]] = []
        self._now = [0] * samples
        self.reasons: dict[int, str] = {}

    def train(self, places: Sequence[int], tokens: Sequence[int]) -> None:
        """Note tokens whose gradient changed the weights."""
        for place, n in zip(places, tokens, strict=True):
            self._now[place] += n

    def drop(self, places: Sequence[int], reason: str) -> None:
        """Note samples that the current epoch does not train."""
        self.reasons.update(dict.fromkeys(places, reason))

    def end_epoch(self) -> None:
        """Start the next epoch's counts."""
        self._epochs.append(self._now)
        self._now = [0] * len(self._now)

    def tokens(self, place: int, expected: int) -> int:
        """Return a sample's trained tokens, of the epoch in which they differ most from the expected number."""
        return max((epoch[place] for epoch in self._epochs), key=lambda n: abs(n - expected), default=0)


class Identified(Protocol):
    """A sample that says which call it is (an `agentrig_grpo.samples.TrainSample` is one)."""

    @property
    def call(self) -> Call | None:
        """Which call; the ledger has no entry for a sample without one."""
        ...

    @property
    def response_ids(self) -> Sequence[int]:
        """Token ids of the response."""
        ...

    @property
    def rollout(self) -> int:
        """The place of its rollout."""
        ...

    @property
    def group(self) -> str:
        """The group of that."""
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
        samples: What the update got, each with its `call`.
        used: What it did with them.
        values: The value of each rollout; None for a failure.
        groups: The group of each.
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
            found.append(Entry(sample.call, "trained", trained))
        elif reason:
            if reason == ZERO_ADVANTAGE:
                others, value = members[sample.group], values[sample.rollout]
                reason = without_gradient(others, value, negative_scale=negative_scale)
            found.append(Entry(sample.call, "dropped", expected, reason))
    return found
