"""The learner's side of the proof of delivery: log-probabilities of given tokens, and digests of its weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import attrs
import torch  # noqa: TID253  (imported with the learner only)

from agentrig.delivery.digests import digests
from agentrig.delivery.noise import with_noise
from agentrig.delivery.verdict import difference
from agentrig_grpo.learner import Learner
from agentrig_grpo.lora import live_weights


@attrs.frozen(kw_only=True)
class _Tokens:
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]


class LearnerView:
    """Implements `agentrig.delivery.Learner`.

    Args:
        learner: The learner.
        dtype: The dtype in which the server computes.
    """

    def __init__(self, learner: Learner, dtype: str) -> None:
        self._learner, self.dtype = learner, dtype
        self.layers: int = getattr(learner.model.config, "num_hidden_layers", 1)

    def logprobs(
        self, ids: Sequence[int], *, temperature: float = 1.0, dtype: torch.dtype | None = None
    ) -> list[float]:
        """Return the log-probabilities of all tokens except the first.

        Args:
            ids: The tokens.
            temperature: Of the softmax.
            dtype: Of weights and arithmetic; None for the forward pass of training.
        """
        model, tokens = self._learner.model, _Tokens(prompt_ids=ids[:1], response_ids=ids[1:])
        modes = {module: module.training for module in model.modules()}
        model.eval()
        try:
            return self._learner.logprobs(tokens, temperature=temperature, dtype=dtype)
        finally:
            for module, mode in modes.items():
                module.training = mode

    def digests(self) -> dict[str, str]:
        """Return name to digest of the current weights with adapters merged, rounded to the server's dtype."""
        return digests(live_weights(self._learner.model), getattr(torch, self.dtype))

    def spread(self, ids: Sequence[int]) -> float:
        """Return the largest change of a log-probability by the server's dtype and the learner's mixed precision.

        Each is measured against fp32, on these tokens and with these weights. They may differ from fp32 in opposite
        directions, so the two are added. For a server in fp32 it is twice the largest change by noise of one rounding
        step: its own rounding and the learner's.
        """
        trained = self.logprobs(ids)
        if self.dtype == "float32":
            noisy = with_noise(self._learner.model, partial(self.logprobs, ids), "float32")
            return 2 * max(difference(trained, found) for found in noisy)
        exact = self.logprobs(ids, dtype=torch.float32)
        rounded = self.logprobs(ids, dtype=getattr(torch, self.dtype))
        return difference(exact, rounded) + difference(exact, trained)
