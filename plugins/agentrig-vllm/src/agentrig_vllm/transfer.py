"""New weights on their way to vLLM: rounded into one buffer of the learner's GPU, which vLLM's process maps.

CUDA's handles pass memory between processes without a copy through the host. A handle is made and opened once: the
buffer is as large as one message and is filled again for each, so that a model of any size needs little memory more.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch  # noqa: TID253  (imported with the weights, or in vLLM's process)

from agentrig.processes.servers import ServerError

ALIGNED = 256
"""Each tensor begins at a multiple of this, in bytes."""

HANDLE = (
    "device",
    "storage_handle",
    "storage_size_bytes",
    "storage_offset_bytes",
    "ref_counter_handle",
    "ref_counter_offset",
    "event_handle",
    "event_sync_required",
)
"""torch's description of shared memory on a GPU, in the order in which `_share_cuda_` returns and takes it."""


class Sender:
    """The learner's side.

    Args:
        dtype: The dtype of the server's floating-point tensors.
        room: Bytes of the buffer; a larger tensor makes it larger.

    Attributes:
        shapes: Name to shape of the tensors that were sent last.
    """

    def __init__(self, dtype: torch.dtype, room: int) -> None:
        self._dtype, self._room = dtype, room
        self._buffer: torch.Tensor | None = None
        self._announced = False
        self.shapes: dict[str, list[int]] = {}

    @torch.no_grad()
    def messages(self, weights: Iterable[tuple[str, torch.Tensor]], device: torch.device) -> Iterator[dict[str, Any]]:
        """Fill the buffer and yield where each tensor lies in it, until all were there.

        The next message overwrites the buffer: ask for it when the server has copied the tensors of the last one.

        Args:
            weights: Name and tensor, on any device.
            device: Where the buffer is made.

        Raises:
            ServerError: A tensor has numbers that are not finite.
        """
        self.shapes = {}
        entries: list[dict[str, Any]] = []
        end = 0
        for name, tensor in weights:
            dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
            size = -(-tensor.numel() * dtype.itemsize // ALIGNED) * ALIGNED
            if entries and end + size > self._room:
                yield self._message(entries)
                entries, end = [], 0
            buffer = self._made(max(size, self._room), device)
            shape = list(tensor.shape)
            entry = {"name": name, "dtype": str(dtype).removeprefix("torch."), "shape": shape, "offset": end}
            view_of(buffer, entry).copy_(tensor.detach())
            self.shapes[name] = shape
            entries.append(entry)
            end += size
        if entries:
            yield self._message(entries)

    def close(self) -> None:
        """Free the buffer; the server must have let go of it."""
        shared_on_gpu = self._announced and self._buffer is not None and self._buffer.is_cuda
        self._buffer, self._announced = None, False
        if shared_on_gpu:
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]

    def _message(self, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        assert self._buffer is not None
        checked = [entry for entry in entries if getattr(torch, entry["dtype"]).is_floating_point]
        # The largest of each, which is NaN if one is: `isfinite` would take twice the memory of a tensor beside it.
        views = [view_of(self._buffer, entry) for entry in checked]
        largest = torch.stack(torch._foreach_norm(views, math.inf)).tolist() if views else []  # the buffer is full now
        wrong = [entry["name"] for entry, most in zip(checked, largest, strict=True) if not math.isfinite(most)]
        if wrong:
            raise ServerError(f"the new weights have numbers that are not finite: {', '.join(wrong[:4])}")
        message: dict[str, Any] = {"tensors": list(entries)}
        if not self._announced:
            message["buffer"] = shared(self._buffer)
            self._announced = True
        return message

    def _made(self, size: int, device: torch.device) -> torch.Tensor:
        if self._buffer is None or self._buffer.numel() < size:
            self._buffer = None
            with plain_segments(device):
                self._buffer = torch.empty(size, dtype=torch.uint8, device=device)
            self._room, self._announced = size, False
        return self._buffer


def shared(buffer: torch.Tensor) -> dict[str, Any]:
    """Return what another process needs to map a buffer on a GPU, as JSON."""
    found = dict(zip(HANDLE, buffer.untyped_storage()._share_cuda_(), strict=True))  # type: ignore[no-untyped-call]
    return {
        **{key: base64.b64encode(v).decode() if isinstance(v, bytes) else v for key, v in found.items()},
        "size": buffer.numel(),
        "start": buffer.storage_offset(),
    }


def counter_of(message: Mapping[str, Any]) -> Path:
    """Return the file where torch counts who uses a buffer; it stays when the process that has shared it is killed."""
    return Path("/dev/shm") / Path(base64.b64decode(message["ref_counter_handle"]).decode()).name


def opened(message: Mapping[str, Any], device: int) -> torch.Tensor:
    """Map a buffer that another process has shared.

    Args:
        message: What `shared` returned.
        device: The number that the buffer's GPU has in this process.
    """
    bytes_of = base64.b64decode
    storage = torch.UntypedStorage._new_shared_cuda(
        device,
        bytes_of(message["storage_handle"]),
        message["storage_size_bytes"],
        message["storage_offset_bytes"],
        bytes_of(message["ref_counter_handle"]),
        message["ref_counter_offset"],
        bytes_of(message["event_handle"]),
        message["event_sync_required"],
    )
    whole = torch.empty(0, dtype=torch.uint8, device=f"cuda:{device}").set_(storage)
    return whole[message["start"] : message["start"] + message["size"]]


def view_of(buffer: torch.Tensor, entry: Mapping[str, Any]) -> torch.Tensor:
    """Return a tensor that lies in the buffer, without a copy."""
    dtype, shape = getattr(torch, entry["dtype"]), torch.Size(entry["shape"])
    start, length = entry["offset"], shape.numel() * dtype.itemsize
    return buffer[start : start + length].view(dtype).view(shape)


@contextmanager
def plain_segments(device: torch.device) -> Iterator[None]:
    """Allocate without expandable segments: their memory has no handle that another process can open."""
    if device.type != "cuda" or "expandable_segments:True" not in _allocator_settings():
        yield
        return
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    try:
        yield
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")


def _allocator_settings() -> str:
    import os

    return " ".join(os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
