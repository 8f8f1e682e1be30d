"""fp32 weights that are trained, and 16-bit copies that the model computes with.

Autocast also makes such copies, but in each pass, and keeps activations between the layers in fp32. Here the copies are
made once per update, and activations between the layers have 16 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch  # noqa: TID253  (imported with the learner only)

TOGETHER = 32
"""Gradients that are added in one operation; until then they are in memory."""


class Masters:
    """The trained weights of a model whose own parameters are copies of fewer bits.

    Gradients add up in fp32: after a backward pass each copy's gradient is added to that of its fp32 weight, and freed.

    Args:
        model: A model in fp32 with all weights trained. Its parameters become copies; its buffers don't change.
        dtype: The dtype of the copies.

    Attributes:
        trained: Name to fp32 parameter.
        copies: Name to the model's own parameter.
    """

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self.copies: dict[str, torch.nn.Parameter] = dict(model.named_parameters())
        self.trained = {name: torch.nn.Parameter(copy.data) for name, copy in self.copies.items()}
        round_weights(model, dtype)
        for name, copy in self.copies.items():
            add = functools.partial(self._arrived, self.trained[name])
            copy.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]
        self._waiting: list[tuple[torch.nn.Parameter, torch.Tensor]] = []

    def _arrived(self, master: torch.nn.Parameter, copy: torch.Tensor) -> None:
        assert copy.grad is not None
        self._waiting.append((master, copy.grad))
        copy.grad = None
        if len(self._waiting) >= TOGETHER:
            self.collect()

    @torch.no_grad()
    def collect(self) -> None:
        """Add the gradients of a backward pass that are not added yet; call it after each."""
        sums, more = [], []
        for master, gradient in self._waiting:
            if master.grad is None:
                master.grad = gradient.float()
            else:
                sums.append(master.grad)
                more.append(gradient)
        if sums:
            torch._foreach_add_(sums, more)
        self._waiting = []

    def drop(self) -> None:
        """Drop the gradients of a backward pass that failed."""
        self._waiting = []
        for copy in self.copies.values():
            copy.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the trained weights into the model."""
        torch._foreach_copy_(list(self.copies.values()), list(self.trained.values()))


def round_weights(model: Any, dtype: torch.dtype) -> None:
    """Round a model's parameters to a dtype; its buffers (the frequencies of positions) don't change."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


@contextmanager
def computing_with(parameters: Mapping[str, torch.nn.Parameter], values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Give parameters other values, and restore them afterwards."""
    kept = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = values[name]
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = kept[name]
