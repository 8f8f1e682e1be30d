"""fp32 weights that are trained, and 16-bit copies that the model computes with; frozen weights have 16 bits only.

Autocast also makes such copies, but in each pass, and keeps activations between the layers in fp32. Here the copies are
made once per update, and activations between the layers have 16 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch  # noqa: TID253  (imported with the learner only)

TOGETHER = 32
"""Gradients that are added in one operation; until then they are in memory."""


class Masters:
    """The trained weights of a model whose own parameters are copies of fewer bits.

    Gradients add up in fp32: after a backward pass each copy's gradient is added to that of its fp32 weight, and freed.

    Args:
        model: A model in fp32. Its parameters are rounded, those that are not trained for good; its buffers don't
            change.
        dtype: The dtype of the copies.

    Attributes:
        trained: Name to fp32 parameter.
        copies: Name to the model's own parameter, of each trained weight.
    """

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self.copies: dict[str, torch.nn.Parameter] = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.trained = {name: torch.nn.Parameter(copy.data) for name, copy in self.copies.items()}
        round_weights(model, dtype)
        for name, copy in self.copies.items():
            copy.master = self.trained[name]  # type: ignore[attr-defined]
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


def master_of(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Return the fp32 weight of which a model's parameter is a copy; the parameter itself, if it is none."""
    found: torch.nn.Parameter = getattr(parameter, "master", parameter)
    return found


def round_weights(model: Any, dtype: torch.dtype) -> None:
    """Round a model's parameters to a dtype; its buffers (the frequencies of positions) don't change."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


@torch.no_grad()
def rounds_exactly(parameters: Iterable[torch.Tensor], dtype: torch.dtype) -> bool:
    """Return whether rounding to a dtype changes no number, as with weights that were read from files of that dtype."""
    return all(torch.equal(p, p.to(dtype).to(p.dtype)) for p in parameters)


@contextmanager
def computing_with(values: Mapping[torch.nn.Parameter, torch.Tensor]) -> Iterator[None]:
    """Give parameters other values, and restore them afterwards."""
    kept = {parameter: parameter.data for parameter in values}
    try:
        for parameter, value in values.items():
            parameter.data = value
        yield
    finally:
        for parameter, value in kept.items():
            parameter.data = value


@contextmanager
def computing_in(model: Any, dtype: torch.dtype) -> Iterator[None]:
    """Let a model compute in another dtype, with the rounding of its fp32 weights instead of their copies.

    Trained weights, and those of the output head, which others read too, have the dtype all the time. Each other module
    has it only while it computes: a second copy of all frozen weights would be much. Of an embedding, only the rows
    that are read get it.
    """
    whole = {p for p in model.parameters() if p.requires_grad}
    whole |= set(model.get_output_embeddings().parameters())

    kept: dict[torch.nn.Parameter, torch.Tensor] = {}

    def enter(module: torch.nn.Module, given: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter.dtype != dtype:
                kept[parameter] = parameter.data
                parameter.data = parameter.data.to(dtype)

    def leave(module: torch.nn.Module, given: Any, output: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter in kept:
                parameter.data = kept.pop(parameter)

    hooks: list[Any] = []
    # A copy of the dtype is its weight's rounding already.
    with computing_with({p: master_of(p).data.to(dtype) for p in whole if p.dtype != dtype}):
        try:
            for module in model.modules():
                if type(module) is torch.nn.Embedding:
                    hooks.append(module.register_forward_hook(lambda _, given, rows: rows.to(dtype)))
                elif any(p not in whole for p in module.parameters(recurse=False)):
                    hooks.append(module.register_forward_pre_hook(enter))
                    hooks.append(module.register_forward_hook(leave, always_call=True))
            yield
        finally:
            for hook in hooks:
                hook.remove()
