"""Credit: what the calls of a step are worth. GRPO's: how much better a rollout did than the others of its task."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from agentrig.errors import AgentrigError
from agentrig.rollouts import Rollout

EPSILON = 1e-6
"""Added to the standard deviation, as verl does."""

LARGEST = 1e12
"""Largest reward, without its sign, that is learned from: the squares of such numbers still fit into fp32."""

Worth = float | None | Sequence[float | None]
"""What the calls of a rollout are worth: one number for all of them, or one for each of its triplets.

A positive number makes what was sampled more likely, a negative one less likely. None leaves it out.
"""

Credit = Callable[[Sequence[Sequence[Rollout]], Any], Iterable[Sequence[Worth]]]
"""`credit(groups, config)`: for each group of a step, the worth of each of its rollouts.

A group is all rollouts of a task, failures included (their `value` is None); `config` has the algorithm's settings.
"""

Weighting = Literal["rollout", "call"]


def advantages(
    values: Sequence[float | None],
    calls: Sequence[int] | None = None,
    *,
    weighting: Weighting = "rollout",
    normalize: bool = True,
    negative_scale: float = 1.0,
) -> list[float]:
    """Return the advantage of each rollout of one group.

    A rollout i with value v_i and weight w_i (1, or its number of calls) has the advantage

        A_i = (v_i - mean) / (std + 1e-6)    mean = sum_j w_j v_j / sum_j w_j
                                             std^2 = sum_j w_j (v_j - mean)^2 / (sum_j w_j - 1)

    which is GRPO's (DeepSeekMath, arXiv:2402.03300, section 4.1.2). Without `normalize` it is v_i - mean, as in
    Dr. GRPO (arXiv:2503.20783), which does not favour tasks that are almost always or almost never solved.

    Args:
        values: The rollouts' values; None for a failure, which is left out of the baseline.
        calls: How many trained calls (or sequences) each rollout has; needed by `call` only.
        weighting: `rollout`: each rollout counts once in mean and deviation. `call`: each trained
            call counts once, so that a rollout with more calls pulls the baseline towards itself
            (as in algorithms that see only calls).
        normalize: Divide by the standard deviation (unbiased); else only the mean is subtracted.
        negative_scale: Negative advantages are multiplied by this.

    Returns:
        One number a rollout. 0.0 for failures, in a zero-variance group, and for a rollout
        that is alone in its group: there is nothing to compare it with.

    Raises:
        AgentrigError: A reward is larger than `LARGEST`, or is not a number.
        ValueError: `values` and `calls` differ in length.
    """
    calls = [1] * len(values) if calls is None else calls
    if len(values) != len(calls):
        raise ValueError(f"{len(values)} values, but {len(calls)} counts of calls")
    for value in values:
        if value is not None and not abs(value) <= LARGEST:
            raise AgentrigError(
                f"a rollout of this step has the reward {value:g}; the loss is computed in fp32, where rewards beyond "
                f"{LARGEST:g} overflow. Scale the reward: most lie between 0 and 1"
            )
    valid = [(v, 1 if weighting == "rollout" else c) for v, c in zip(values, calls, strict=True) if v is not None]
    total = sum(w for _, w in valid)
    counted = [v for v, w in valid if w > 0]
    if len(counted) < 2 or min(counted) == max(counted):
        return [0.0] * len(values)  # exactly: rounding in the mean must not make a gradient
    mean = math.fsum(v * w for v, w in valid) / total
    squares = math.fsum(w * (v - mean) ** 2 for v, w in valid)
    scale = math.sqrt(squares / (total - 1)) + EPSILON if normalize else 1.0
    found = [0.0 if v is None else (v - mean) / scale for v in values]
    return [a * negative_scale if a < 0 else a for a in found]
