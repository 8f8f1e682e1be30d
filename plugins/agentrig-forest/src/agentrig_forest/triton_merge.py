"""Triton kernels that save rows of results and gradients of attention; `agentrig_forest.levels` imports them on CUDA.

torch's kernels for rows given by their numbers take several times as long.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ELEMENTS = 2048
"""Elements of a program of `add`; more if a row has more."""


def merge(
    out: torch.Tensor,
    lse: torch.Tensor,
    rows: tuple[int, int] | torch.Tensor,
    one: torch.Tensor,
    its: torch.Tensor,
    *,
    first: bool = False,
) -> None:
    """Merge a result into those so far by their log-sum-exp, in place.

    Args:
        out: The results so far, [tokens, heads, size], contiguous.
        lse: Their log-sum-exp, fp32 [heads, tokens], contiguous.
        rows: The tokens that the new result is of: from one to before another, or their numbers, int64 [n].
        one: The new result, [n, heads, size]; its last dimension is contiguous.
        its: Its log-sum-exp, fp32 [heads, n].
        first: Whether there is no result of these tokens yet: what is in the memory is not read.
    """
    n, heads, size = one.shape
    given = isinstance(rows, torch.Tensor)
    _merge[(n,)](
        out, lse, rows if given else lse, one, its, 0 if given else rows[0], lse.stride(0), one.stride(0),
        one.stride(1), its.stride(0), its.stride(1), heads, size, GIVEN=given, FIRST=first,
        HEADS=triton.next_power_of_2(heads), SIZE=triton.next_power_of_2(size), num_warps=4,
    )  # fmt: skip


def add(x: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, *, first: bool) -> None:
    """Add values to some rows, or put them there.

    Args:
        x: [tokens, heads, size], contiguous.
        rows: The numbers of some rows, each once, int64 [n].
        values: [n, heads, size].
        first: Put them there: what is in the memory is not read.
    """
    width, values = x.shape[1] * x.shape[2], values.contiguous()
    block = triton.next_power_of_2(width)
    together = max(1, ELEMENTS // block)
    _add[(triton.cdiv(len(rows), together),)](
        x, rows, values, len(rows), width, FIRST=first, ROWS=together, BLOCK=block, num_warps=4
    )


@triton.jit(do_not_specialize=["n"])
def _add(x, rows, values, n, width: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    row = tl.load(rows + number, mask=number < n, other=0)
    inside = (number < n)[:, None] & (column < width)[None, :]
    found = tl.load(values + number[:, None] * width + column[None, :], mask=inside, other=0.0)
    place = x + row[:, None] * width + column[None, :]
    if not FIRST:
        found = (tl.load(place, mask=inside, other=0.0).to(tl.float32) + found.to(tl.float32)).to(found.dtype)
    tl.store(place, found, mask=inside)


@triton.jit
def _merge(
    out, lses, rows, one, its, first, tokens, one_row, one_head, its_head, its_row, heads: tl.constexpr,
    size: tl.constexpr, GIVEN: tl.constexpr, FIRST: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    # One token: its share of the new result is exp(its - log(exp(lse) + exp(its))).
    number = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + number) if GIVEN else first + number
    head, place = tl.arange(0, HEADS), tl.arange(0, SIZE)
    real = head < heads
    after = tl.load(its + head.to(tl.int64) * its_head + number * its_row, mask=real, other=0.0)
    inside = real[:, None] & (place < size)[None, :]
    new = one + number * one_row + head[:, None].to(tl.int64) * one_head + place[None, :]
    y = tl.load(new, mask=inside, other=0.0).to(tl.float32)
    old = out + row * heads * size + head[:, None] * size + place[None, :]
    if not FIRST:
        before = tl.load(lses + head.to(tl.int64) * tokens + row, mask=real, other=0.0)
        most = tl.maximum(before, after)
        both = most + tl.log(tl.exp(before - most) + tl.exp(after - most))
        x = tl.load(old, mask=inside, other=0.0).to(tl.float32)
        y = x + (y - x) * tl.exp(after - both)[:, None]
        after = both
    tl.store(old, y.to(out.dtype.element_ty), mask=inside)
    tl.store(lses + head.to(tl.int64) * tokens + row, after, mask=real)
