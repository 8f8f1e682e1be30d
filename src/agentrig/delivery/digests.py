"""A checksum of a tensor's bytes and their order, the same on every device: tensors with equal digests are equal.

It is a sum of 64-bit words, each times a multiplier that depends on its index, modulo 2^64. It costs two passes at
memory speed, and a CPU and a GPU give the same result. It detects faults; it is not cryptographic. Results are read
from a device once for all tensors. A thousand small operations would take longer than the sums: on CUDA one kernel sums
a tensor, and elsewhere small tensors of one shape are summed together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

WIDTH = 1021
"""Words of a row: a prime, so that the rows and columns of a weight matrix never get the same multipliers."""

GOLDEN = -7046029254386353131
"""2^64 over the golden ratio, as a signed number."""

TOGETHER = 16 << 20
"""Most bytes of tensors that are copied, so that one operation sums them."""

SLOTS = 256
"""Results that are allocated at once for tensors that one kernel sums."""

MASK = 0xFFFFFFFFFFFFFFFF

_known: dict[torch.device, torch.Tensor] = {}
"""Device to the multipliers of the first indices."""


class Digests:
    """Sums tensors on their devices, and reads the sums once at the end.

    Args:
        dtype: Floating-point tensors are first rounded to it, as for a server; None does not round.
        together: Small tensors wait until there are this many bytes of their shape. With 0 each one is summed
            immediately.
        reused: Whether a tensor's memory may change after `add`: then small tensors are copied while they wait.
    """

    def __init__(self, dtype: torch.dtype | None = None, *, together: int = TOGETHER, reused: bool = False) -> None:
        self._dtype, self._together, self._reused = dtype, together, reused
        self._waiting: dict[tuple[object, ...], list[tuple[str, torch.Tensor]]] = defaultdict(list)
        self._sums: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
        self._names: dict[torch.device, list[tuple[str, int]]] = defaultdict(list)
        self._slots: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
        self._order: list[str] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor."""
        tensor = tensor.detach()
        self._order.append(name)
        size = tensor.numel() * tensor.element_size()
        if size and self._kernel(tensor.device):
            self._launch(name, tensor)
            return
        if size % 64 or 2 * size > self._together:  # several rows must have whole words only, also after rounding
            self._sum([(name, tensor)])
            return
        if self._reused:
            rounded = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
            tensor = tensor.to(rounded, copy=True)
        key = (tensor.device, tensor.dtype, tensor.shape)
        self._waiting[key].append((name, tensor))
        if len(self._waiting[key]) * size >= self._together:
            self._sum(self._waiting.pop(key))

    def begin(self) -> None:
        """Start all sums: from now on the tensors may change. A device sums them while the host goes on."""
        for some in self._waiting.values():
            self._sum(some)
        self._waiting.clear()

    def result(self) -> dict[str, str]:
        """Return name to digest, in the order of `add`."""
        import torch

        self.begin()
        found = {}
        for device, sums in self._sums.items():
            for (name, size), values in zip(self._names[device], torch.cat(sums).tolist(), strict=True):
                found[name] = _text(size, values)
        return {name: found[name] for name in self._order}

    def _kernel(self, device: torch.device) -> bool:
        """Return whether one kernel sums a whole tensor there."""
        return device.type == "cuda" and _has_triton()

    def _launch(self, name: str, tensor: torch.Tensor) -> None:
        """Sum one tensor with one kernel."""
        import torch

        from agentrig.delivery import triton_words

        with torch.no_grad():
            data = self._bytes(tensor)
            whole = data.numel() // 8 * 8
            if data.data_ptr() % 8 or data.numel() - whole:  # bytes after the last word
                sums = _sums(data[None])
            else:
                slots = self._slots[data.device]
                if not slots:
                    made = torch.zeros(SLOTS, 1, 4, dtype=torch.int64, device=data.device)
                    slots += reversed(made.unbind())
                sums = slots.pop()
                triton_words.add(data.view(torch.int64), sums[0], WIDTH, GOLDEN)
            self._sums[data.device].append(sums)
            self._names[data.device].append((name, data.numel()))

    def _sum(self, some: Sequence[tuple[str, torch.Tensor]]) -> None:
        import torch

        with torch.no_grad():
            tensors = [tensor for _, tensor in some]
            whole = tensors[0][None] if len(tensors) == 1 else torch.stack(tensors)
            data = self._bytes(whole).view(len(tensors), -1)
            self._sums[data.device].append(_sums(data))
            self._names[data.device] += [(name, data.shape[1]) for name, _ in some]

    def _bytes(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor's bytes, rounded as the server's: uint8 [n]."""
        import torch

        if self._dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(self._dtype)
        return tensor.contiguous().reshape(-1).view(torch.uint8)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


FUSED: Mapping[str, Sequence[str]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""The layers that servers such as vLLM join into one, in the order of their rows."""


def digest(tensor: torch.Tensor) -> str:
    """Return 32 hexadecimal digits for a tensor's bytes in their order; its shape and dtype do not enter."""
    return digests([("", tensor)])[""]


def digests(tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None = None) -> dict[str, str]:
    """Return name to digest; floating-point tensors are first rounded to `dtype`, as for a server."""
    return begun(tensors, dtype).result()


def begun(tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None = None) -> Digests:
    """Return the same, begun: its `result` waits for the device, and the tensors may change before."""
    found = Digests(dtype)
    for name, tensor in tensors:
        found.add(name, tensor)
    found.begin()
    return found


def held(parameters: Mapping[str, torch.Tensor], shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return the digest of the server's copy of each of the learner's tensors, by the learner's name.

    Args:
        parameters: The server's parameters by its own names; it joins those of `FUSED` layers and may pad a vocabulary.
        shapes: Name to shape of the learner's tensors.

    Returns:
        Name to digest; tensors that the server splits or quantizes (tensor parallelism) are left out.
    """
    found = Digests()
    for name, shape in shapes.items():
        place = _place(name, parameters, shapes)
        if place is not None and list(place.shape) == list(shape):
            found.add(name, place)
    return found.result()


def _place(
    name: str, parameters: Mapping[str, torch.Tensor], shapes: Mapping[str, Sequence[int]]
) -> torch.Tensor | None:
    whole = parameters.get(name)
    if whole is not None:
        return whole[: shapes[name][0]] if whole.ndim and shapes[name] else whole
    for fused, parts in FUSED.items():
        layer, _, kind = name.rpartition(".")
        head, _, part = layer.rpartition(".")
        if part not in parts:
            continue
        whole = parameters.get(f"{head}.{fused}.{kind}")
        rows = [shapes.get(f"{head}.{each}.{kind}", [0])[0] for each in parts]
        if whole is None or whole.shape[0] != sum(rows):
            return None
        start = sum(rows[: parts.index(part)])
        return whole[start : start + rows[parts.index(part)]]
    return None


def _sums(data: torch.Tensor) -> torch.Tensor:
    """Return the sums of rows of bytes, int64 [rows, 4]; several rows must have whole words only.

    The four sums are those of the block's columns, the block's rows, the words after the block, and the last bytes.
    """
    import torch

    rows, size = data.shape
    rest = data[:, size // 8 * 8 :].to(torch.int64)
    # Words must begin at a multiple of their size; a slice of a joined matrix may not.
    data = data if data.storage_offset() % 8 == 0 and data.data_ptr() % 8 == 0 else data.clone()
    words = data.reshape(-1)[: rows * size // 8 * 8].view(torch.int64).view(rows, -1)
    height = words.shape[1] // WIDTH
    block, tail = words[:, : height * WIDTH].view(rows, height, WIDTH), words[:, height * WIDTH :]
    factors = _multipliers(max(height, WIDTH), words.device)
    zero = torch.zeros(rows, dtype=torch.int64, device=words.device)
    parts = (block.sum(1) if height else None, block.sum(2) if height else None, tail, rest)
    found = [zero if p is None or not p.shape[1] else (p * factors[: p.shape[1]]).sum(1) for p in parts]
    return torch.stack(found, 1)


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
