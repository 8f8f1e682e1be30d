"""What the loss needs of each response token: behaviour log-probability, advantage and weight."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

import attrs
import torch  # noqa: TID253  (imported with the learner only)

from agentrig.forest.sequences import Batch
from agentrig.learners import TrainSample


@attrs.frozen(eq=False)
class LossInputs:
    """What the loss needs of some samples, by sample and place, on the device.

    Attributes:
        offsets: Where each sample's tokens begin, and the last end, [samples + 1].
        behaviour: Log-probabilities, fp32 [tokens]; None if some sample has none.
        proximal: Those under the weights that the step began with, fp32 [tokens]; None if some sample has none.
        advantages: fp32 [tokens].
        weights: Of a token of each sample in the loss, fp32 [samples].
    """

    offsets: torch.Tensor
    behaviour: torch.Tensor | None
    proximal: torch.Tensor | None
    advantages: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(cls, samples: Sequence[TrainSample], weights: Sequence[float], device: torch.device) -> LossInputs:
        """Return those of some samples.

        Raises:
            ValueError: A sample has not one log-probability, or advantage, for each response token.
        """
        lengths = [len(s.response_ids) for s in samples]

        def numbers(values: Sequence[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        def flat(rows: Sequence[Sequence[float] | None]) -> torch.Tensor | None:
            given = [row for row in rows if row is not None]
            for row, length in zip(rows, lengths, strict=True):
                if row is not None and len(row) != length:
                    raise ValueError(f"{len(row)} numbers for {length} response tokens")
            return numbers(list(chain.from_iterable(given))) if len(given) == len(rows) else None

        advantages = flat([s.advantages for s in samples])
        assert advantages is not None
        return cls(
            torch.tensor([0, *accumulate(lengths)], device=device),
            flat([s.logprobs for s in samples]),
            flat([s.proximal for s in samples]),
            advantages,
            numbers(weights),
        )

    def places(self, batch: Batch) -> torch.Tensor:
        """Return where the response tokens of a batch are among those of all samples, [T]."""
        return self.offsets[batch.sample] + batch.place

    def look_up(self, batch: Batch) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """Return the behaviour log-probability, advantage and weight of each response token of a batch, [T]."""
        places = self.places(batch)
        behaviour = None if self.behaviour is None else self.behaviour[places]
        return behaviour, self.advantages[places], self.weights[batch.sample]
