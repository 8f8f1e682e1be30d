"""New weights on their way to the server: packed into memory without a name, and read from it."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch  # noqa: TID253  (only who holds weights imports this module)

ALIGNED = 64
"""Each tensor begins at a multiple of this, in bytes."""


def pack(weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> tuple[int, list[dict[str, Any]]]:
    """Copy weights into memory that only its descriptor leads to; it is gone when its last holder is.

    Args:
        weights: Names to tensors, on any device.
        dtype: Of the copies of floating-point tensors.

    Returns:
        The descriptor, which the caller must close, and where each tensor lies.

    Raises:
        OSError: There is not enough memory.
    """
    entries, end = [], 0
    for name, tensor in weights.items():
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        entry = {"name": name, "dtype": str(kind).removeprefix("torch."), "shape": list(tensor.shape), "offset": end}
        entries.append(entry)
        end += -(-tensor.numel() * kind.itemsize // ALIGNED) * ALIGNED
    descriptor = _memory(max(end, 1))
    try:
        memory = mmap.mmap(descriptor, max(end, 1))
        for entry, tensor in zip(entries, weights.values(), strict=True):
            if tensor.numel():
                _view(memory, entry).copy_(tensor.detach())
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, entries


def unpack(descriptor: int, entries: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Return the tensors that `pack` laid down, without copying them; they keep the memory. Closes the descriptor."""
    try:
        # A private mapping: nothing that happens to these tensors reaches the sender.
        memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    return {entry["name"]: _view(memory, entry) for entry in entries}


def _view(memory: mmap.mmap, entry: Mapping[str, Any]) -> torch.Tensor:
    dtype, shape = getattr(torch, entry["dtype"]), tuple(entry["shape"])
    count = torch.Size(shape).numel()
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=entry["offset"]).view(shape)


def _memory(size: int) -> int:
    """Return a descriptor of that many bytes: in memory on Linux, elsewhere a file that has no name."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("agentrig-weights")
    else:
        with tempfile.TemporaryFile(prefix="agentrig-weights-") as file:
            descriptor = os.dup(file.fileno())
    try:
        # Now, where a lack of room is an error; later, in the middle of a copy, it would be a signal that kills.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        else:
            os.ftruncate(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
