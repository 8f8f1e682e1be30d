"""Transfer of new weights to the server: through memory that both processes share, filled again for each version.

On the CPU it is unnamed shared memory, on a CUDA device memory of that device: then no copy goes through the host. The
server copies them into its own tensors, which lie in another order (joined matrices). Nothing has a name, so nothing is
left behind when a process is killed.

On the device it uses CUDA's driver instead of torch's reductions: those keep counts in named files of /dev/shm, which
remain when a process is killed, and cannot share memory of expandable segments. This memory is freed with its process.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch  # noqa: TID253  (imported with the weights only)

ALIGNED = 64
"""Each tensor begins at a multiple of this, in bytes."""

LAZY_PEER_ACCESS = 1
"""The flag of `cuIpcOpenMemHandle`: devices of one machine may be different ones."""


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
    """The server's side."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._bytes: torch.Tensor | None = None
        self._memory: DeviceMemory | None = None

    def unpack(self, message: Mapping[str, Any], descriptor: int | None) -> dict[str, torch.Tensor]:
        """Return the tensors that `Sender.pack` wrote, without a copy: read them, and don't keep them.

        Args:
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


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * 64),)


@cache
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuInit(0)
    return driver


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the driver."""
    status = getattr(_driver(), name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(text))
        raise OSError(f"{name} failed: {(text.value or b'unknown').decode()} ({status})")


class _Interface:
    """Memory that torch can use without a copy; see `__cuda_array_interface__` in Numba's documentation."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
            "strides": None,
        }


class DeviceMemory:
    """A piece of a device's memory, as bytes.

    Attributes:
        bytes: A uint8 tensor of its size; use it only until `close`.

    Args:
        opened: Whether it belongs to another process.
    """

    def __init__(self, device: str, address: int, size: int, *, opened: bool) -> None:
        self._address, self._opened = address, opened
        self._device = torch.device("cuda", _index(device))
        self.bytes = torch.as_tensor(_Interface(address, size), device=self._device)

    @classmethod
    def allocate(cls, device: str, size: int) -> DeviceMemory:
        """Allocate memory that can be shared.

        Raises:
            OSError: There is not enough.
        """
        address = ctypes.c_uint64()
        torch.cuda.empty_cache()  # what torch keeps for later is not free for others
        with _context(device):
            _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return cls(device, int(address.value), size, opened=False)

    @classmethod
    def open(cls, device: str, handle: str, size: int) -> DeviceMemory:
        """Open the memory of another process.

        Args:
            device: The device, as this process names it.
            handle: What `handle` returned there.

        Raises:
            OSError: The driver refuses: another device, another container, or the process has ended.
        """
        address = ctypes.c_uint64()
        given = _Handle.from_buffer_copy(bytes.fromhex(handle))
        with _context(device):
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(LAZY_PEER_ACCESS))
        return cls(device, int(address.value), size, opened=True)

    @property
    def handle(self) -> str:
        """The handle with which another process opens it, as hexadecimal digits."""
        found = _Handle()
        with _context(self._device):
            _call("cuIpcGetMemHandle", ctypes.byref(found), ctypes.c_uint64(self._address))
        return bytes(found).hex()

    def close(self) -> None:
        """Free it; does nothing if it is closed already."""
        if self._address:
            address, self._address = ctypes.c_uint64(self._address), 0
            with _context(self._device):
                torch.cuda.synchronize()
                _call("cuIpcCloseMemHandle" if self._opened else "cuMemFree_v2", address)


def _index(device: torch.device | str) -> int:
    place = torch.device(device).index
    return torch.cuda.current_device() if place is None else place


@contextmanager
def _context(device: torch.device | str) -> Iterator[None]:
    """Let the driver's functions use a device in this thread: in the context that torch uses, the primary one."""
    number = ctypes.c_int()
    _call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(_index(device)))
    context = ctypes.c_void_p()
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
    try:
        _call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
    finally:
        _call("cuDevicePrimaryCtxRelease_v2", number)
