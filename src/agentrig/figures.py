"""The names of an algorithm's figures: the same in every algorithm, and what older runs called them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")

GRAD_NORM = "grad_norm"
"""L2 norm of the gradient before clipping, the mean over a step's updates."""

FORMER_NAMES: Mapping[str, str] = {"gradient_norm": GRAD_NORM}
"""What earlier versions wrote into `metrics.jsonl`, and its name now."""


def canonical(figures: Mapping[str, T]) -> dict[str, T]:
    """Return an algorithm's figures under the names that they have now."""
    return {FORMER_NAMES.get(name, name): value for name, value in figures.items()}
