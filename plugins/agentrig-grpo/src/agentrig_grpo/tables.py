"""What the loss needs of each response token: behaviour log-probability, advantage and weight."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch  # noqa: TID253  (imported with the learner only)

from agentrig.forest.sequences import Batch
from agentrig.learners import TrainSample


@attrs.frozen(eq=False)
class Table:
    """Behaviour log-probability, advantage and weight by sample and place, on the device.

    Attributes:
        offsets: Where each sample's tokens begin, and the last end, [samples + 1].
        behaviour: Log-probabilities, fp32 [tokens]; None if some sample has none.
        proximal: Those under the weights that the step began with, fp32 [tokens]; None if some sample has none.
        advantages: fp32 [samples].
        weights: Of a token of each sample in the loss, fp32 [samples].
    """

    offsets: torch.Tensor
    behaviour: torch.Tensor | None
    advantages: torch.Tensor
    weights: torch.Tensor
    proximal: torch.Tensor | None = None

    @classmethod
    def of(cls, samples: Sequence[TrainSample], weights: Sequence[float], device: torch.device) -> Table:
        """Return the table of some samples.

        Raises:
            ValueError: A sample has not one log-probability for each response token.
        """
        offsets: list[int] = [0]
        flat: list[float] = []
        have = all(s.logprobs is not None for s in samples)
        for sample in samples:
            logprobs = sample.logprobs or [0.0] * len(sample.response_ids)
            if len(logprobs) != len(sample.response_ids):
                raise ValueError(f"{len(logprobs)} log-probabilities for {len(sample.response_ids)} response tokens")
            flat += logprobs
            offsets.append(len(flat))
        return cls(
            torch.tensor(offsets, device=device),
            torch.tensor(flat, dtype=torch.float32, device=device) if have else None,
            torch.tensor([s.advantage for s in samples], dtype=torch.float32, device=device),
            torch.tensor(weights, dtype=torch.float32, device=device),
            flat_proximal(samples, device),
        )

    def places(self, batch: Batch) -> torch.Tensor:
        """Return where the response tokens of a batch are among those of all samples, [T]."""
        return self.offsets[batch.sample] + batch.place

    def look_up_proximal(self, batch: Batch) -> torch.Tensor | None:
        """Return the proximal log-probability of each response token of a batch, [T]; None without any."""
        return None if self.proximal is None else self.proximal[self.places(batch)]

    def look_up(self, batch: Batch) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """Return the behaviour log-probability, advantage and weight of each response token of a batch, [T]."""
        behaviour = None if self.behaviour is None else self.behaviour[self.places(batch)]
        return behaviour, self.advantages[batch.sample], self.weights[batch.sample]


def flat_proximal(samples: Sequence[TrainSample], device: torch.device) -> torch.Tensor | None:
    """Return the proximal log-probabilities of all samples, one after the other, fp32; None if some sample has none."""
    if any(s.proximal is None for s in samples):
        return None
    flat = [value for s in samples for value in s.proximal or ()]
    return torch.tensor(flat, dtype=torch.float32, device=device)
