"""Log-probabilities of given tokens, for hosts without flash-attn.

verl computes them with flash-attn's cross-entropy. If that is not installed, it loops over the rows of the logits. The
rows that its FSDP engine passes are single tokens, so this is a Python loop over every token of a batch, which takes
most of a training step (tests/benchmarks/verl_step.md has the figures).
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch  # noqa: TID253  (runs in verl's workers; imported by the actor only)

log = logging.getLogger(__name__)

CHUNK = 4096
"""Tokens in fp32 at once: 4096 with a vocabulary of 152,000 need 2.5 GB, and logsumexp needs as much again."""


class TokenLogprobs(torch.autograd.Function):
    """log softmax(logits)[label], in fp32 for any dtype of the logits, without a second copy of the logits.

    The backward pass keeps the logits themselves and one number per token, log sum exp(logits); the gradient is
    (onehot(label) - softmax(logits)) times the incoming one, computed chunk by chunk.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities, fp32 [T], of labels [T] under logits [T, V]."""
        found = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        totals = torch.empty_like(found)
        for begin in range(0, len(logits), CHUNK):
            part = slice(begin, begin + CHUNK)
            scores = logits[part].float()
            totals[part] = torch.logsumexp(scores, dim=-1)
            found[part] = scores.gather(-1, labels[part, None]).squeeze(-1) - totals[part]
        ctx.save_for_backward(logits, labels, totals)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient of the logits, in their dtype."""
        (gradient,) = gradients
        logits, labels, totals = ctx.saved_tensors
        found = torch.empty_like(logits)
        for begin in range(0, len(logits), CHUNK):
            part = slice(begin, begin + CHUNK)
            # The difference is fp32, as totals are, and all that follows is done in its place.
            slope = (logits[part] - totals[part, None]).exp_().mul_(-gradient[part, None])
            slope.scatter_add_(-1, labels[part, None], gradient[part, None])
            found[part] = slope
        return found, None


def token_logprobs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of labels; replaces verl's `logprobs_from_logits`.

    Args:
        logits: [..., V]; not changed.
        labels: [...].

    Returns:
        fp32 [...], as flash-attn's cross-entropy returns them.
    """
    flat: torch.Tensor = TokenLogprobs.apply(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))  # type: ignore[no-untyped-call]
    return flat.view(labels.shape)


def install() -> bool:
    """Make verl's FSDP engine in this process use `token_logprobs` where it has no kernel.

    An installed flash-attn kernel can be switched off by VERL_DISABLE_FLASH_ATTN_CE=1, which verl's
    `full_determinism` sets when the engine starts. So the variable is read at each call.

    Returns:
        Whether it was installed; False if Ascend's kernel is available.
    """
    from verl.utils import torch_functional
    from verl.workers.engine.fsdp import transformer_impl

    if torch_functional.NPU_CROSS_ENTROPY_LOSS_AVAILABLE:
        return False
    kernel = torch_functional.logprobs_from_logits if torch_functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE else None

    def chosen(logits: torch.Tensor, labels: torch.Tensor, inplace_backward: bool = True) -> torch.Tensor:
        if kernel is not None and os.environ.get("VERL_DISABLE_FLASH_ATTN_CE", "0") != "1":
            found: torch.Tensor = kernel(logits, labels, inplace_backward=inplace_backward)
            return found
        return token_logprobs(logits, labels)

    transformer_impl.logprobs_from_logits = chosen
    return True
