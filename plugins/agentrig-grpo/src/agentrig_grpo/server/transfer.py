"""Transfer of new weights to the server through unnamed shared memory."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch  # noqa: TID253  (imported with the weights only)

ALIGNED = 64
"""Each tensor begins at a multiple of this, in bytes."""


def pack(weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> tuple[int, list[dict[str, Any]]]:
    """Copy weights into unnamed memory. It is freed when its last descriptor is closed.

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
    """Return the tensors that `pack` wrote, without a copy; they keep the memory alive. Closes the descriptor."""
    try:
        # A private mapping: changes to these tensors do not reach the sender.
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
        # Allocate now: a lack of memory is an error here, but a fatal signal during the copy.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        else:
            os.ftruncate(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
