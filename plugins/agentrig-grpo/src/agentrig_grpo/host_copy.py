"""Copies of a learner's tensors in host memory, which stay as they are while the next update changes the tensors."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch  # noqa: TID253  (imported with the learner only)

log = logging.getLogger(__name__)

SLAB = 1 << 31
"""Most bytes of page-locked memory in one piece. torch rounds each piece up to a power of two."""

LEAST = 1 << 26
"""Least bytes of a piece that is made for a tensor for which there is no room in the others."""

FEW = 4096
"""Elements: a tensor with fewer that is in host memory already gets no buffer."""

ALIGNED = 64
"""Bytes to which a buffer's place in such a piece is rounded up."""


class HostCopy:
    """Copies tensors to host memory: plainly on a CPU; from an accelerator on a stream of its own.

    From an accelerator, `take` returns before the copies are complete: call `before_change` before the tensors change,
    and `wait` before the copies are read. The buffers are page-locked, made once, and used again by the next `take`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device.type)
        self._stream: Any = None
        self._copied: Any = None  # the event behind the latest copies
        self._sources: list[torch.Tensor] = []  # alive until they are copied
        self._buffers: dict[str, torch.Tensor] = {}
        self._slabs: list[tuple[torch.UntypedStorage, int]] = []  # page-locked memory, and how much of it is in use
        self._reserving: threading.Thread | None = None
        self._locked, self._settled = True, False

    def reserve(self, size: int) -> None:
        """Begin to make page-locked memory for so many bytes in the background: it takes seconds for a large model."""
        if self._module is not None:
            self._reserving = threading.Thread(target=self._grow, args=(size,), name="host memory", daemon=True)
            self._reserving.start()

    @torch.no_grad()
    def take(self, state: Any) -> Any:
        """Copy all tensors of a state, nested dicts and lists, which are copied too.

        A tensor that comes twice is copied once.
        """
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None
        if self._module is None:
            return self._each(state, "", lambda name, tensor: tensor.clone(), {})
        if self._stream is None:
            self._stream = self._module.Stream(device=self._device)
        self._settled = False
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):  # on the host, copies from there take place at once
            copied = self._each(state, "", self._to_buffer, {})
            self._copied = self._stream.record_event()
        return copied

    def before_change(self) -> None:
        """Let what is queued on the device from here on begin after the latest copies; the host does not wait."""
        if self._copied is not None:
            self._module.current_stream(self._device).wait_event(self._copied)

    def wait(self) -> None:
        """Wait, on the host, until the latest copies are complete."""
        if self._copied is not None:
            self._copied.synchronize()
            self._sources = []

    def _each(
        self, value: Any, name: str, make: Callable[[str, torch.Tensor], torch.Tensor], seen: dict[Any, torch.Tensor]
    ) -> Any:
        if isinstance(value, torch.Tensor):
            tensor = value.detach()
            key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else name
            if key not in seen:
                seen[key] = make(name, tensor)
            return seen[key]
        if isinstance(value, Mapping):
            return {key: self._each(each, f"{name}.{key}", make, seen) for key, each in value.items()}
        if isinstance(value, list):
            return [self._each(each, f"{name}.{i}", make, seen) for i, each in enumerate(value)]
        return value

    def _to_buffer(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        elsewhere = tensor.device.type != self._device.type
        if elsewhere and tensor.numel() < FEW:  # the optimizer's counts
            return tensor.clone()
        if elsewhere and not self._settled:  # moments in host memory, which the device may still be writing
            self._module.current_stream(self._device).synchronize()
            self._settled = True
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = self._buffers[name] = self._buffer(tensor)
        buffer.copy_(tensor, non_blocking=True)
        self._sources.append(tensor)
        return buffer

    def _buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return page-locked memory for a contiguous copy of a tensor."""
        size = tensor.numel() * tensor.element_size()
        place = next((i for i, (slab, used) in enumerate(self._slabs) if used + size <= slab.nbytes()), None)
        if place is None:
            self._lock(max(size, LEAST))
            place = len(self._slabs) - 1
        slab, used = self._slabs[place]
        self._slabs[place] = slab, used + -(-size // ALIGNED) * ALIGNED
        piece: Any = slab[used : used + size]  # it is a storage of its own: files hold no more than the tensor
        return torch.empty(0, dtype=tensor.dtype).set_(piece, 0, tensor.shape)  # type: ignore[call-overload,no-any-return]

    def _grow(self, size: int) -> None:
        """Make memory for so many bytes in all, in pieces of at most `SLAB`."""
        for start in range(0, size, SLAB):
            self._lock(min(SLAB, size - start))

    def _lock(self, size: int) -> None:
        """Make one piece of page-locked memory; of plain memory if there is no more of that kind."""
        if self._locked:
            try:
                made = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self._locked = False
                log.warning("checkpoints are copied more slowly: no page-locked memory (%s)", str(error).split("\n")[0])
        if not self._locked:
            made = torch.empty(size, dtype=torch.uint8)
        self._slabs.append((made.untyped_storage(), 0))
