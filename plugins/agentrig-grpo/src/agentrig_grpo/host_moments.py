"""AdamW whose moments lie in host memory, and go through the device a part at a time while the optimizer steps.

It is torch's kernel on the same numbers, and each element's new value depends on that element alone: the weights are
those of AdamW with its moments on the device, bit for bit. On an accelerator the moments of the next part arrive and
those of the last one leave while the kernel computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import attrs
import torch  # noqa: TID253  (imported with the learner only)

PART = 1 << 24
"""Elements whose moments are on the device at once, in each of `SLOTS` places: 128 MiB."""

SLOTS = 3
"""Places for parts: one arrives, one is computed with, one leaves."""

ALIGNED = 4
"""Each piece begins at a multiple of so many elements, as a tensor of its own does: the kernel reads four at once."""

MOMENTS = ("exp_avg", "exp_avg_sq")


@attrs.frozen(eq=False)
class Piece:
    """Some elements of a flattened parameter, and where their moments are put in a place for parts."""

    parameter: torch.nn.Parameter
    start: int
    end: int
    offset: int


class HostAdamW(torch.optim.AdamW):
    """AdamW in fp32 with its moments in host memory; its state dict is that of `torch.optim.AdamW`.

    Args:
        parameters: In fp32, contiguous, on one device.
        settings: As `torch.optim.AdamW` takes them.
    """

    def __init__(self, parameters: Any, **settings: Any) -> None:
        super().__init__(parameters, **settings, fused=True)
        parameters = [p for group in self.param_groups for p in group["params"]]
        size = min(PART, sum(_padded(p.numel()) for p in parameters))
        # They stay: made later, they would lie between activations, and keep the memory of these.
        self._places = [
            (parameters[0].new_empty(size, requires_grad=False), parameters[0].new_empty(size, requires_grad=False))
            for _ in range(SLOTS)
        ]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            if not given:
                continue
            for parameter in given:
                self._begin(parameter)
            torch._foreach_add_([self.state[p]["step"] for p in given], 1)
            self._through_device(group, list(_parts(given)))

    def _begin(self, parameter: torch.nn.Parameter) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in MOMENTS:
                state[name] = _host_zeros(parameter)

    def _through_device(self, group: Mapping[str, Any], parts: Sequence[Sequence[Piece]]) -> None:
        """Bring each part's moments to the device, step, and take them back."""
        device = parts[0][0].parameter.device
        queues = _Queues(device, len(parts))
        for number, pieces in enumerate(parts):
            place = self._places[number % SLOTS]
            with queues.arriving(number):
                for piece in pieces:
                    for here, there in self._moments(piece, place):
                        here.copy_(there, non_blocking=True)
            with queues.computing(number):
                self._compute(group, pieces, place)
            with queues.leaving(number):
                for piece in pieces:
                    for here, there in self._moments(piece, place):
                        there.copy_(here, non_blocking=True)
        queues.wait()

    def _moments(
        self, piece: Piece, place: tuple[torch.Tensor, torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield a piece's two moments: where they are on the device, and in host memory."""
        state, length = self.state[piece.parameter], piece.end - piece.start
        for name, buffer in zip(MOMENTS, place, strict=True):
            host = state[name].view(-1)[piece.start : piece.end]
            yield buffer[piece.offset : piece.offset + length], host

    def _compute(
        self, group: Mapping[str, Any], pieces: Sequence[Piece], place: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        whole = [piece.parameter for piece in pieces]
        at = [slice(piece.start, piece.end) for piece in pieces]
        to = [slice(piece.offset, piece.offset + piece.end - piece.start) for piece in pieces]
        torch._fused_adamw_(
            [p.detach().view(-1)[a] for p, a in zip(whole, at, strict=True)],
            [_flat(p.grad)[a] for p, a in zip(whole, at, strict=True)],
            [place[0][b] for b in to],
            [place[1][b] for b in to],
            [],
            [self.state[p]["step"] for p in whole],
            amsgrad=False,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            grad_scale=None,
            found_inf=None,
        )

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state of this optimizer or of `torch.optim.AdamW`; the moments never are on the device as a whole."""
        moments = {i: {n: kept.get(n) for n in MOMENTS} for i, kept in state_dict["state"].items()}
        rest = {i: {n: v for n, v in kept.items() if n not in MOMENTS} for i, kept in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": rest})
        parameters = [p for group in self.param_groups for p in group["params"]]
        for i, found in moments.items():
            for name, moment in found.items():
                kept = self.state[parameters[i]][name] = _host_zeros(parameters[i])
                kept.copy_(moment)


class _Queues:
    """The order of a step's copies and kernels: three streams of an accelerator; on a CPU one thing after another."""

    def __init__(self, device: torch.device, parts: int) -> None:
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device.type)
        self._main = self._in = self._out = None
        if self._module is not None:
            self._main = self._module.current_stream(device)
            self._in, self._out = self._module.Stream(device), self._module.Stream(device)
            self._in.wait_stream(self._main)  # what was in the places' memory before may still be computed with
        self._arrived, self._computed, self._left = ([self._event() for _ in range(parts)] for _ in range(3))

    def _event(self) -> Any:
        return None if self._module is None else self._module.Event()

    def arriving(self, number: int) -> AbstractContextManager[None]:
        """Return the context in which a part's moments are brought: when the part before in its place has left."""
        return self._on(self._in, self._left[number - SLOTS] if number >= SLOTS else None, self._arrived[number])

    def computing(self, number: int) -> AbstractContextManager[None]:
        """Return the context in which a part is computed."""
        return self._on(self._main, self._arrived[number], self._computed[number])

    def leaving(self, number: int) -> AbstractContextManager[None]:
        """Return the context in which a part's moments are taken back."""
        return self._on(self._out, self._computed[number], self._left[number])

    def wait(self) -> None:
        """Wait until host memory has all moments: others read it without a stream."""
        if self._out is not None:
            self._out.synchronize()

    @contextmanager
    def _on(self, queue: Any, after: Any, done: Any) -> Iterator[None]:
        if self._module is None:
            yield
            return
        with self._module.stream(queue):
            if after is not None:
                queue.wait_event(after)
            yield
            done.record(queue)


def _parts(parameters: Sequence[torch.nn.Parameter]) -> Iterator[list[Piece]]:
    """Yield parts of at most `PART` elements; a parameter that is larger than what is left of one is split."""
    part: list[Piece] = []
    filled = 0
    for parameter in parameters:
        start, size = 0, parameter.numel()
        while start < size:
            length = min(size - start, PART - filled)
            part.append(Piece(parameter, start, start + length, filled))
            start, filled = start + length, filled + _padded(length)
            if filled >= PART:
                yield part
                part, filled = [], 0
    if part:
        yield part


def _padded(elements: int) -> int:
    return -(-elements // ALIGNED) * ALIGNED


def _flat(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None
    return gradient.reshape(-1)


def _host_zeros(parameter: torch.Tensor) -> torch.Tensor:
    """Return zeros of a parameter's shape in host memory, from which an accelerator can copy by itself."""
    return torch.zeros(parameter.shape, dtype=torch.float32, pin_memory=parameter.device.type != "cpu")
