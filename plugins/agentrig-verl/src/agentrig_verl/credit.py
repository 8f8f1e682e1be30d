"""Credit: how much better a rollout did than its group; the same for every trained call in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

EPSILON = 1e-6
"""Added to the standard deviation, as verl does."""

Weighting = Literal["rollout", "call"]


def advantages(
    values: Sequence[float | None],
    calls: Sequence[int],
    *,
    weighting: Weighting = "rollout",
    normalize: bool = True,
    negative_scale: float = 1.0,
) -> list[float]:
    """Return the advantage of each rollout of one group (GRPO, arXiv 2402.03300, equation 3).

    Args:
        values: The rollouts' values; None for a failure, which is left out of the baseline.
        calls: How many trained calls (or sequences) each rollout has; used by `call` only.
        weighting: `rollout`: each rollout counts once in mean and deviation. `call`: each trained
            call counts once, so that a rollout with more calls pulls the baseline towards itself
            (what algorithms do that see calls only).
        normalize: Divide by the standard deviation (unbiased); else only the mean is taken off.
        negative_scale: Negative advantages are multiplied by this.

    Returns:
        One number a rollout. 0.0 for failures, in a group without a difference, and for a rollout
        that is alone in its group: there is nothing to compare it with.

    Raises:
        ValueError: `values` and `calls` differ in length.
    """
    if len(values) != len(calls):
        raise ValueError(f"{len(values)} values, but {len(calls)} counts of calls")
    valid = [(v, 1 if weighting == "rollout" else c) for v, c in zip(values, calls, strict=True) if v is not None]
    total = sum(w for _, w in valid)
    counted = [v for v, w in valid if w > 0]
    if len(counted) < 2 or min(counted) == max(counted):
        return [0.0] * len(values)
    mean = math.fsum(v * w for v, w in valid) / total
    squares = math.fsum(w * (v - mean) ** 2 for v, w in valid)
    scale = math.sqrt(squares / (total - 1)) + EPSILON if normalize else 1.0
    found = [0.0 if v is None else (v - mean) / scale for v in values]
    return [a * negative_scale if a < 0 else a for a in found]
