"""Sampling: one token for every row of a batch, each row with its own settings and its own randomness."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import attrs
import numpy as np
import torch  # noqa: TID253  (imported in the server process only)

BLOCK = 64


class Uniforms:
    """An endless stream of numbers in [0, 1), the same for the same key on every machine.

    A request owns its stream, so what it samples does not depend on the requests beside it.
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


@attrs.frozen(eq=False)
class Settings:
    """How the rows of a batch are sampled.

    Attributes:
        temperature: fp32 [rows, 1], 1 where the row is greedy.
        top_p: fp32 [rows, 1], or None when no row cuts its tail.
        greedy: bool [rows], or None when no row is greedy.
        all_greedy: Whether every row is.
    """

    temperature: torch.Tensor
    top_p: torch.Tensor | None
    greedy: torch.Tensor | None
    all_greedy: bool

    @classmethod
    def of(cls, temperatures: Sequence[float], top_ps: Sequence[float], device: torch.device) -> Settings:
        """Build the settings of rows; temperature 0 takes the likeliest token, top_p 1 cuts nothing."""
        greedy = [t == 0 for t in temperatures]
        return cls(
            torch.tensor([t or 1.0 for t in temperatures], device=device)[:, None],
            torch.tensor(top_ps, device=device)[:, None] if any(p < 1 for p in top_ps) else None,
            torch.tensor(greedy, device=device) if any(greedy) else None,
            all(greedy),
        )


def sample(
    logits: torch.Tensor, settings: Settings, uniforms: Sequence[float], allowed: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row by inverting the cumulative distribution at the row's number.

    Args:
        logits: fp32 [rows, vocabulary].
        uniforms: A number in [0, 1) for each row.
        allowed: Tokens that each row may sample, bool [rows, vocabulary]; None for all.

    Returns:
        Tokens, long [rows], and log-probabilities of the whole vocabulary, fp32 [rows, vocabulary]:
        log softmax(logits / temperature), of the untempered softmax where the temperature is 0, and
        before top-p (nucleus sampling, arXiv:1904.09751) cuts the tail, and of all tokens, whether allowed
        or not: these are the numbers that a learner can recompute.
    """
    logp = torch.log_softmax(logits / settings.temperature, -1)
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    if settings.all_greedy:
        return logits.argmax(-1), logp
    # What is allowed may be so unlikely that its share of the whole softmax is 0.
    probs = logp.exp() if allowed is None else torch.softmax(logits / settings.temperature, -1)
    if settings.top_p is not None:
        probs = _nucleus(probs, settings.top_p)
    # fp64, or a vocabulary of 150,000 would lose its tail to rounding.
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    target = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=logits.shape[1] - 1)
    if settings.greedy is not None:
        tokens = torch.where(settings.greedy, logits.argmax(-1), tokens)
    return tokens, logp


def _nucleus(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Set to zero all but the likeliest tokens that together reach `top_p`; the likeliest always stays."""
    ordered, index = probs.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    ordered = ordered.masked_fill(before >= top_p, 0.0)
    ordered[:, 0] = ordered[:, 0].clamp_min(1e-30)
    return torch.zeros_like(probs).scatter_(-1, index, ordered)
