"""A checksum of a tensor's bytes and their order, the same on every device: tensors with equal digests are equal.

It is a sum of 64-bit words, each times a multiplier that depends on its index, modulo 2^64. It costs two passes at
memory speed, and a CPU and a GPU give the same result. It detects faults; it is not cryptographic. Results are read
from a device once for all tensors; on CUDA one kernel sums a tensor.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

WIDTH = 1021
"""Words of a row: a prime, so that the rows and columns of a weight matrix never get the same multipliers."""

GOLDEN = -7046029254386353131
"""2^64 over the golden ratio, as a signed number."""

MASK = 0xFFFFFFFFFFFFFFFF

FUSED: Mapping[str, Sequence[str]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""The layers that servers such as vLLM join into one, in the order of their rows."""

_known: dict[torch.device, torch.Tensor] = {}
"""Device to the multipliers of the first indices."""


class Digests:
    """Sums tensors on their devices, and reads the sums once at the end.

    Args:
        dtype: Floating-point tensors are first rounded to it, as for a server; None does not round.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._sums: list[tuple[str, int, torch.Tensor]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Start to sum a tensor. It may change afterwards: a device does one thing after another."""
        import torch

        with torch.no_grad():
            if self._dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(self._dtype)
            data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            words = data.numel() // 8
            if words and data.is_cuda and _has_triton() and data.numel() == 8 * words and data.data_ptr() % 8 == 0:
                from agentrig.delivery import triton_words

                sums = torch.zeros(4, dtype=torch.int64, device=data.device)
                triton_words.add(data.view(torch.int64), sums, WIDTH, GOLDEN)
            else:
                sums = _sums(data)
        self._sums.append((name, data.numel(), sums))

    def result(self) -> dict[str, str]:
        """Return name to digest, 32 hexadecimal digits, in the order of `add`; a shape and a dtype do not enter."""
        import torch

        devices: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
        for _, _, sums in self._sums:
            devices[sums.device].append(sums)
        read = {device: iter(torch.stack(sums).tolist()) for device, sums in devices.items()}
        return {name: _text(size, next(read[sums.device])) for name, size, sums in self._sums}


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def digests(tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None = None) -> dict[str, str]:
    """Return name to digest; floating-point tensors are first rounded to `dtype`, as for a server."""
    found = Digests(dtype)
    for name, tensor in tensors:
        found.add(name, tensor)
    return found.result()


def fingerprint(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> str:
    """Return one digest of all tensors and their names; floating-point tensors are first rounded to `dtype`."""
    found = digests(((name, tensors[name]) for name in sorted(tensors)), dtype)
    return hashlib.blake2b(json.dumps(found).encode(), digest_size=16).hexdigest()


def held(parameters: Mapping[str, torch.Tensor], shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return name to digest of the server's copy of each of the learner's tensors; see `copies`."""
    return digests(copies(parameters, shapes))


def copies(
    parameters: Mapping[str, torch.Tensor], shapes: Mapping[str, Sequence[int]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the server's copy of each of the learner's tensors with the learner's name: rows of its own parameters.

    Args:
        parameters: The server's parameters by its own names; it joins those of `FUSED` layers and may pad a vocabulary.
        shapes: Name to shape of the learner's tensors. Those that the server splits or quantizes (tensor parallelism)
            are left out.
    """
    found = dict(parameters)
    for name, joined in parameters.items():
        layer, _, kind = name.rpartition(".")
        head, _, fused = layer.rpartition(".")
        parts = [part for each in FUSED.get(fused, ()) if (part := f"{head}.{each}.{kind}") in shapes]
        rows = [shapes[part][0] for part in parts]
        if parts and sum(rows) == len(joined):
            found.update(zip(parts, joined.split(rows), strict=True))  # type: ignore[no-untyped-call]
    for name, shape in shapes.items():
        if name in found:
            copy = found[name][: shape[0]] if shape and found[name].ndim else found[name]
            if list(copy.shape) == list(shape):
                yield name, copy


def _sums(data: torch.Tensor) -> torch.Tensor:
    """Return four sums of bytes, int64 [4]: of the block's columns, its rows, the words after it, the last bytes."""
    import torch

    whole = data.numel() // 8 * 8
    # Words must begin at a multiple of their size; a slice of a joined matrix may not.
    aligned = data.storage_offset() % 8 == 0 and data.data_ptr() % 8 == 0
    words = (data if aligned else data.clone())[:whole].view(torch.int64)
    height = len(words) // WIDTH
    block, tail = words[: height * WIDTH].view(height, WIDTH), words[height * WIDTH :]
    factors = _multipliers(max(height, WIDTH), data.device)
    parts = (block.sum(0), block.sum(1), tail, data[whole:].to(torch.int64))
    return torch.stack([(part * factors[: len(part)]).sum() for part in parts])


def _text(size: int, sums: Sequence[int]) -> str:
    """Return the digest of `size` bytes with these sums."""
    columns, rows, tail, rest = sums
    return f"{(columns + size) & MASK:016x}{((rows * GOLDEN + tail) * GOLDEN + rest) & MASK:016x}"


def _multipliers(count: int, device: torch.device) -> torch.Tensor:
    """Return the multipliers of the first indices, at least `count`."""
    import torch

    known = _known.get(device)
    if known is None or len(known) < count:
        found = (torch.arange(count, device=device) + 1) * GOLDEN
        known = _known[device] = (found ^ (found >> 29)) | 1
    return known
