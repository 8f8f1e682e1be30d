"""A number for a tensor's bytes and their places, on any device: two tensors with the same one are the same.

It is a linear sum over machine words with multipliers that depend on the place, modulo 2^64, so it costs two passes at
the memory's speed, and a CPU and a GPU give the same. It finds faults, not forgeries.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

WIDTH = 1021
"""Words of a row: a prime, so that the rows and columns of a weight matrix never fall on the same places."""

GOLDEN = -7046029254386353131
"""2^64 over the golden ratio, as a signed number."""


def digest(tensor: torch.Tensor) -> str:
    """Return 32 hexadecimal digits for a tensor's bytes in their order; its shape and dtype are not part of them."""
    import torch

    with torch.no_grad():
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        words, rest = _words(data)
        height = words.numel() // WIDTH
        block, tail = words[: height * WIDTH].view(height, WIDTH), words[height * WIDTH :]
        first = (block.sum(0) * _multipliers(WIDTH, words)).sum() + data.numel()
        second = (block.sum(1) * _multipliers(height, words)).sum()
        for part in (tail, rest):
            second = second * GOLDEN + (part * _multipliers(part.numel(), words)).sum()
        return "".join(f"{value & 0xFFFFFFFFFFFFFFFF:016x}" for value in torch.stack([first, second]).tolist())


def digests(tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None = None) -> dict[str, str]:
    """Return name to digest; floating-point tensors are first rounded to `dtype`, as they are for a server."""
    return {
        name: digest(tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor)
        for name, tensor in tensors
    }


def _words(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bytes as words of eight, and the last bytes that fill none."""
    import torch

    whole = data.numel() // 8 * 8
    rest = data[whole:].to(torch.int64)
    # Words must begin at a multiple of their size; a slice of a joined matrix may not.
    data = data if data.storage_offset() % 8 == 0 and data.data_ptr() % 8 == 0 else data.clone()
    return data[:whole].view(torch.int64), rest


def _multipliers(count: int, like: torch.Tensor) -> torch.Tensor:
    import torch

    found = (torch.arange(count, device=like.device) + 1) * GOLDEN
    return (found ^ (found >> 29)) | 1
