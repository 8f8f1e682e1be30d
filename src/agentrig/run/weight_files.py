"""Compares the weights of checkpoints, file by file, for algorithms that do not compare them themselves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrig.algorithms import WeightDifference


def file_difference(new: Path, recorded: Path, before: Path) -> WeightDifference | None:
    """Return how far the weights of two checkpoints are apart; None if they don't hold the same tensors.

    Args:
        new: The checkpoint that a repeated step made; a directory with `*.safetensors`.
        recorded: The one that the run made.
        before: The one that both began with.
    """
    held, first = dict(_files_of(recorded)), dict(_files_of(before))
    mine = dict(_files_of(new))
    if not mine or mine.keys() != held.keys() or mine.keys() != first.keys():
        return None
    largest, squares, changes = 0.0, 0.0, 0.0
    for name, file in mine.items():
        there = _tensor(held[name], name)
        difference = _tensor(file, name) - there
        largest = max(largest, float(difference.abs().max())) if difference.numel() else largest
        squares += float(difference.square().sum())
        changes += float((there - _tensor(first[name], name)).square().sum())
    relative = math.sqrt(squares / changes) if changes else math.inf if squares else 0.0
    return WeightDifference(largest=largest, relative=relative)


def _files_of(checkpoint: Path) -> Iterator[tuple[str, Path]]:
    """Yield each tensor's name and its file."""
    from safetensors import safe_open

    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a dict)
                yield name, file


def _tensor(file: Path, name: str) -> Any:
    from safetensors import safe_open

    with safe_open(str(file), framework="pt") as tensors:
        return tensors.get_tensor(name).double()
