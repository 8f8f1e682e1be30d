"""A Triton kernel that sums a tensor's words in one launch; `agentrig.delivery.digests` imports this on CUDA only."""

from __future__ import annotations

import torch  # noqa: TID253  (imported with a learner or a server only)
import triton
import triton.language as tl

BLOCK = 4096
"""Words that a program reads."""


def add(words: torch.Tensor, sums: torch.Tensor, width: int, golden: int) -> None:
    """Add the sums of words to the first three of `sums`, modulo 2^64: by column, by row, and of those after the rows.

    Args:
        words: int64 [n], contiguous, of at least one word.
        sums: int64 [3 or more], zeros.
        width: Words of a row.
        golden: What the index is multiplied with, see `agentrig.delivery.digests`.
    """
    n = len(words)
    with torch.cuda.device(words.device):  # Triton launches on the current one
        _add[(triton.cdiv(n, BLOCK),)](words, sums, n, WIDTH=width, GOLDEN=golden, BLOCK=BLOCK, num_warps=8)


@triton.jit(do_not_specialize=["n"])
def _add(words, sums, n, WIDTH: tl.constexpr, GOLDEN: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + place, mask=place < n, other=0)
    height = n // WIDTH
    row, column = place // WIDTH, place % WIDTH
    inside = row < height
    by_column = _multiplier(column, GOLDEN) * word  # after the rows, the column is the index too
    zero = tl.zeros_like(word)
    tl.atomic_add(sums, tl.sum(tl.where(inside, by_column, zero)))
    tl.atomic_add(sums + 1, tl.sum(tl.where(inside, _multiplier(row, GOLDEN) * word, zero)))
    tl.atomic_add(sums + 2, tl.sum(tl.where(inside, zero, by_column)))


@triton.jit
def _multiplier(index, GOLDEN: tl.constexpr):
    found = (index + 1) * GOLDEN
    return (found ^ (found >> 29)) | 1
