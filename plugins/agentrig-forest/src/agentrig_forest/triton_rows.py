"""Triton kernels over the rows of a matrix of logits; `agentrig_forest.head` imports this on CUDA only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096
"""Logits that a program reads at once."""


def logprobs(
    logits: torch.Tensor, targets: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each row's log softmax(logits * scale) at its target, its log-sum-exp, and its entropy: fp32 [T]."""
    n, width = logits.shape
    found, lse, entropy = (torch.empty(n, dtype=torch.float, device=logits.device) for _ in range(3))
    _logprobs[(n,)](logits, targets, found, lse, entropy, width, scale, BLOCK=BLOCK, num_warps=8)
    return found, lse, entropy


def gradient(
    logits: torch.Tensor, targets: torch.Tensor, lse: torch.Tensor, gradient: torch.Tensor, scale: float
) -> None:
    """Replace logits by their gradient, where `gradient` is that of the log-probabilities, [T]."""
    n, width = logits.shape
    _gradient[(n,)](logits, targets, lse, gradient, width, scale, BLOCK=BLOCK, num_warps=8)


@triton.jit
def _logprobs(logits, targets, found, lses, entropies, width: tl.constexpr, scale, BLOCK: tl.constexpr):
    # One row: the sums of exp(x - most) and of x exp(x - most), where `most` is the largest x so far.
    row = tl.program_id(0).to(tl.int64)
    start_of_row = logits + row * width
    most, total, weighted = -float("inf"), 0.0, 0.0
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        x = tl.load(start_of_row + columns, mask=inside, other=-float("inf")).to(tl.float32) * scale
        larger = tl.maximum(most, tl.max(x, 0))
        p = tl.exp(x - larger)
        shrink = tl.exp(most - larger)
        total = total * shrink + tl.sum(p, 0)
        weighted = weighted * shrink + tl.sum(p * tl.where(inside, x, 0.0), 0)
        most = larger
    lse = most + tl.log(total)
    at = tl.load(start_of_row + tl.load(targets + row)).to(tl.float32) * scale
    tl.store(found + row, at - lse)
    tl.store(lses + row, lse)
    tl.store(entropies + row, lse - weighted / total)


@triton.jit
def _gradient(logits, targets, lses, gradients, width: tl.constexpr, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start_of_row = logits + row * width
    lse, target = tl.load(lses + row), tl.load(targets + row)
    factor = tl.load(gradients + row) * scale
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        x = tl.load(start_of_row + columns, mask=inside, other=-float("inf")).to(tl.float32) * scale
        hit = tl.where(columns == target, 1.0, 0.0)
        tl.store(start_of_row + columns, (factor * (hit - tl.exp(x - lse))).to(tl.bfloat16), mask=inside)
