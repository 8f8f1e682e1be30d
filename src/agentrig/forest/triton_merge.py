"""A Triton kernel that merges two results of attention by their log-sum-exp; `agentrig.forest.levels` imports it."""

from __future__ import annotations

import torch  # noqa: TID253  (imported with a learner only)
import triton
import triton.language as tl


def merge(
    out: torch.Tensor,
    lse: torch.Tensor,
    rows: tuple[int, int] | torch.Tensor,
    one: torch.Tensor,
    its: torch.Tensor,
) -> None:
    """Merge a result into those so far, in place.

    Args:
        out: The results so far, [tokens, heads, size], contiguous.
        lse: Their log-sum-exp, fp32 [heads, tokens], contiguous.
        rows: The tokens that the new result is of: from one to before another, or their numbers, int64 [n].
        one: The new result, [n, heads, size]; its last dimension is contiguous.
        its: Its log-sum-exp, fp32 [heads, n].
    """
    n, heads, size = one.shape
    given = isinstance(rows, torch.Tensor)
    _merge[(n,)](
        out, lse, rows if given else lse, one, its, 0 if given else rows[0], lse.stride(0), one.stride(0),
        one.stride(1), its.stride(0), its.stride(1), heads, size, GIVEN=given, HEADS=triton.next_power_of_2(heads),
        SIZE=triton.next_power_of_2(size), num_warps=4,
    )  # fmt: skip


@triton.jit
def _merge(
    out, lses, rows, one, its, first, tokens, one_row, one_head, its_head, its_row, heads: tl.constexpr,
    size: tl.constexpr, GIVEN: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    # One token: its share of the new result is exp(its - log(exp(lse) + exp(its))).
    number = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + number) if GIVEN else first + number
    head, place = tl.arange(0, HEADS), tl.arange(0, SIZE)
    real = head < heads
    before = tl.load(lses + head.to(tl.int64) * tokens + row, mask=real, other=0.0)
    after = tl.load(its + head.to(tl.int64) * its_head + number * its_row, mask=real, other=0.0)
    most = tl.maximum(before, after)
    both = most + tl.log(tl.exp(before - most) + tl.exp(after - most))
    share = tl.exp(after - both)[:, None]
    inside = real[:, None] & (place < size)[None, :]
    old = out + row * heads * size + head[:, None] * size + place[None, :]
    new = one + number * one_row + head[:, None].to(tl.int64) * one_head + place[None, :]
    x = tl.load(old, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(new, mask=inside, other=0.0).to(tl.float32)
    tl.store(old, (x + (y - x) * share).to(out.dtype.element_ty), mask=inside)
    tl.store(lses + head.to(tl.int64) * tokens + row, both, mask=real)
