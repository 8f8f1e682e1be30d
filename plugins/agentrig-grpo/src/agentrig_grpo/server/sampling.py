"""Sampling: one token for every row of a batch, each row with its own settings and its own randomness."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch  # noqa: TID253  (imported in the server process only)

BLOCK = 64


class Uniforms:
    """An endless stream of numbers in [0, 1), the same for the same key on every machine.

    A request owns its stream, so what it samples depends neither on the requests beside it nor on
    the order of their arrival.
    """

    def __init__(self, *key: int | str) -> None:
        digest = hashlib.blake2b("|".join(map(str, key)).encode(), digest_size=16).digest()
        self._rng = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
        self._block: list[float] = []
        self._next = BLOCK

    def __call__(self) -> float:
        """Return the next number."""
        if self._next == BLOCK:
            self._block, self._next = self._rng.random(BLOCK).tolist(), 0
        self._next += 1
        return self._block[self._next - 1]


def sample(
    logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor | None, uniforms: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row by inverting the cumulative distribution at the row's number.

    Args:
        logits: fp32 [rows, vocabulary].
        temperature: fp32 [rows]; 0 takes the likeliest token.
        top_p: fp32 [rows], or None when no row cuts its tail (nucleus sampling, arXiv:1904.09751).
        uniforms: A number in [0, 1) for each row.

    Returns:
        Tokens, long [rows], and log-probabilities of the whole vocabulary, fp32 [rows, vocabulary]:
        log softmax(logits / temperature), of the untempered softmax where the temperature is 0, and
        before top-p cuts the tail: these are the numbers that a learner can recompute.
    """
    greedy = temperature == 0
    logp = torch.log_softmax(logits / torch.where(greedy, 1.0, temperature)[:, None], -1)
    probs = logp.exp()
    if top_p is not None:
        probs = _nucleus(probs, top_p)
    # fp64, or a vocabulary of 150,000 would lose its tail to rounding.
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    target = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=logits.shape[1] - 1)
    return torch.where(greedy, logits.argmax(-1), tokens), logp


def _nucleus(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Set to zero all but the likeliest tokens that together reach `top_p`; the likeliest always stays."""
    ordered, index = probs.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    ordered = ordered.masked_fill(before >= top_p[:, None], 0.0)
    ordered[:, 0] = ordered[:, 0].clamp_min(1e-30)
    return torch.zeros_like(probs).scatter_(-1, index, ordered)
