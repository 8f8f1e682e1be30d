"""Transfer of new weights to the server: through memory that both processes share, filled again for each version.

On the CPU it is unnamed shared memory, on a CUDA device memory of that device: then no copy goes through the host. The
server copies them into its own tensors, which lie in another order (joined matrices). Nothing has a name, so nothing is
left behind when a process is killed.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch  # noqa: TID253  (imported with the weights only)

if TYPE_CHECKING:
    from agentrig_grpo.server.device_memory import DeviceMemory

ALIGNED = 64
"""Each tensor begins at a multiple of this, in bytes."""


class Sender:
    """The run's side.

    Args:
        dtype: Of the floating-point tensors that arrive.
        device: The server's device, as torch names it.
    """

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self._dtype, self._device = dtype, device
        self._bytes: torch.Tensor | None = None
        self._memory: DeviceMemory | None = None
        self._entries: list[dict[str, Any]] = []

    def pack(
        self, weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
    ) -> tuple[dict[str, Any], int | None]:
        """Copy weights into the shared memory; the server must have read the last ones.

        Args:
            weights: Names and tensors, on any device. Each tensor is copied before the next is asked for. Of an
                iterator, which can be read only once, all must be there at once.

        Returns:
            What `Receiver.unpack` needs: a message of JSON values, and a descriptor, which the caller must close, if
            the memory is new and on the CPU.

        Raises:
            OSError: There is not enough memory.
        """
        pairs = weights.items() if isinstance(weights, Mapping) else weights
        pairs = list(pairs) if isinstance(pairs, Iterator) else pairs
        if self._bytes is not None and self._written(pairs):
            return {"tensors": self._entries}, None
        place, end, self._entries = "", 0, []
        for name, tensor in pairs:
            place = place or (str(tensor.device) if tensor.is_cuda else "")
            self._entries.append({**self._kind(name, tensor), "offset": end})
            end += -(-tensor.numel() * self._dtype_of(tensor).itemsize // ALIGNED) * ALIGNED
        message: dict[str, Any] = {"tensors": self._entries}
        descriptor = None
        if self._bytes is None or self._bytes.numel() != max(end, 1):
            self.close()
            descriptor = self._allocate(max(end, 1), message, place)
        try:
            if not self._written(pairs):
                raise ValueError("the weights have other names, shapes or dtypes when they are read again")
        except BaseException:
            if descriptor is not None:
                os.close(descriptor)
            raise
        return message, descriptor

    @torch.no_grad()
    def _written(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> bool:
        """Copy weights to the places of the last ones; return whether they have the same names, shapes and dtypes."""
        assert self._bytes is not None
        places = iter(self._entries)
        for name, tensor in pairs:
            entry = next(places, {})
            if any(entry.get(key) != value for key, value in self._kind(name, tensor).items()):
                return False
            _view(self._bytes, entry).copy_(tensor.detach())
        if self._bytes.is_cuda:
            torch.cuda.synchronize(self._bytes.device)
        return next(places, None) is None

    def _kind(self, name: str, tensor: torch.Tensor) -> dict[str, Any]:
        dtype = str(self._dtype_of(tensor)).removeprefix("torch.")
        return {"name": name, "dtype": dtype, "shape": list(tensor.shape)}

    def _dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        return self._dtype if tensor.is_floating_point() else tensor.dtype

    def _allocate(self, size: int, message: dict[str, Any], place: str) -> int | None:
        """Allocate on a CUDA device, or on the CPU if `place` is ''; return a new descriptor."""
        if place and self._device.startswith("cuda") and torch.version.cuda:  # not ROCm, which has the same name
            from agentrig_grpo.server.device_memory import DeviceMemory

            self._memory = DeviceMemory.allocate(place, size)
            self._bytes = self._memory.bytes
            message["handle"], message["size"] = self._memory.handle, size
            return None
        descriptor = _memory(size)
        try:
            self._bytes = _mapped(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def close(self) -> None:
        """Free the memory, as far as it is this process's."""
        self._bytes = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None


class Receiver:
    """The server's side.

    Args:
        device: The server's device, as torch names it.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._bytes: torch.Tensor | None = None
        self._memory: DeviceMemory | None = None

    def unpack(self, message: Mapping[str, Any], descriptor: int | None) -> dict[str, torch.Tensor]:
        """Return the tensors that `Sender.pack` wrote, without a copy: read them, and don't keep them.

        Args:
            message: From `Sender.pack`.
            descriptor: What came with it, or None; it is closed.

        Raises:
            OSError: The memory cannot be opened.
            ValueError: The message is the first, and brings none.
        """
        if descriptor is not None or "handle" in message:
            self.close()
        if descriptor is not None:
            try:
                self._bytes = _mapped(descriptor)
            finally:
                os.close(descriptor)
        elif "handle" in message:
            from agentrig_grpo.server.device_memory import DeviceMemory

            self._memory = DeviceMemory.open(self._device, message["handle"], message["size"])
            self._bytes = self._memory.bytes
        if self._bytes is None:
            raise ValueError("no weights came with the message")
        return {entry["name"]: _view(self._bytes, entry) for entry in message["tensors"]}

    def close(self) -> None:
        """Let go of the run's memory; no tensor of `unpack` may be read afterwards."""
        self._bytes = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def _view(memory: torch.Tensor, entry: Mapping[str, Any]) -> torch.Tensor:
    dtype, shape = getattr(torch, entry["dtype"]), torch.Size(entry["shape"])
    size = shape.numel() * dtype.itemsize
    return memory[entry["offset"] : entry["offset"] + size].view(dtype).view(shape)


def _mapped(descriptor: int) -> torch.Tensor:
    """Return what a descriptor holds, as bytes; child processes do not get it."""
    memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    if hasattr(mmap, "MADV_DONTFORK"):
        memory.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(memory, dtype=torch.uint8)


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
