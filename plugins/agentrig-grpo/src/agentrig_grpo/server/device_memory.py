"""Memory of one CUDA device that two processes share: allocated by one, opened by the other through a handle.

It uses CUDA's driver instead of torch's reductions: those keep counts in named files of /dev/shm, which remain when a
process is killed, and cannot share memory of expandable segments. This memory is freed with its process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch  # noqa: TID253  (imported with the weights only)

LAZY_PEER_ACCESS = 1
"""The flag of `cuIpcOpenMemHandle`: devices of one machine may be different ones."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * 64),)


@cache
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuInit(0)
    return driver


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the driver.

    Raises:
        OSError: It failed; the message has its name and CUDA's.
    """
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
        device: torch's name of the device.
        address: Where it begins.
        size: In bytes.
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
            size: In bytes.

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
