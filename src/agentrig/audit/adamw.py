"""AdamW's step, from its paper, and how far a kernel in fp32 may be from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

U = 2.0**-24
"""Half a unit in the last place of fp32: what one operation rounds by, relative to its result."""

EPSILON = 1e-8
"""AdamW's, in the denominator; torch's and bitsandbytes' default, which no setting changes."""

Numbers = NDArray[np.float64]


class Change(NamedTuple):
    """What an update should do to some elements: to weights and mean gradients, and what a kernel may differ by."""

    change: Numbers
    bound: Numbers
    mean: Numbers
    mean_bound: Numbers


def learning_rate(settings: Mapping[str, Any], *, step: int, update: int) -> float:
    """Return the learning rate of an update; `step` and `update` of the run, from 1.

    As agentrig-grpo's README says of its keys, it rises to `lr` over `warmup_steps` updates, and a `linear` scheduler
    lowers it with each step, almost to 0 in the last.
    """
    rate: float = settings["lr"] * min(1.0, update / max(settings["warmup_steps"], 1))
    if settings["lr_scheduler_type"] == "linear":
        rate *= min(1.0, max(1, settings["steps"] - step + 1) / settings["steps"])
    return rate


def adamw(
    weight: Numbers,
    gradient: Numbers,
    mean: Numbers,
    square: Numbers,
    *,
    made: float | Numbers,
    rate: float,
    settings: Mapping[str, Any],
) -> Change:
    """Return AdamW's step (arXiv:1711.05101, algorithm 2) in 64 bits, and the bound of one in 32.

    With u = 2^-24, b1 and b2 the two betas, m and v the moments, and g the gradient, a fused kernel rounds

    - the new mean: two products, a sum (or a difference, a product and a sum), and b1 and 1 - b1 as 32-bit numbers.
      Each is relative to its operands, not to the result: where b1 m and (1 - b1) g cancel, little is left of the
      result and all of the error. With the rounding of a clipped gradient that is at most 8 u (b1 |m| + |g|);
    - the new square: the same, but of numbers of one sign, so relative to the result. 1 - b2 as a 32-bit number is
      wrong by up to u b2 / (1 - b2), and so are the corrections 1 - b^t, most at t = 1;
    - the root, the quotient, the rate and their product: a few u of the step;
    - the weight, when it is decayed and when it is stored: a few u of it;
    - in 8 bits, bitsandbytes' kernel uses the device's approximate root and quotient, whose errors have no stated
      bound: one percent of the step is allowed for them;
    - numbers below 2^-126, which a device may take for 0: next to epsilon nothing is seen of them.

    Args:
        weight: The weights before, any shape.
        gradient: The gradients that the optimizer got.
        mean: The mean gradients before.
        square: The mean squared gradients before.
        made: How many updates were made before.
        rate: The learning rate.
        settings: With `beta1`, `beta2`, `weight_decay`, and `optimizer` if it is in 8 bits.
    """
    beta1, beta2, decay = settings["beta1"], settings["beta2"], settings["weight_decay"]
    new_mean = beta1 * mean + (1 - beta1) * gradient
    new_square = beta2 * square + (1 - beta2) * gradient**2
    first, second = 1 - beta1 ** (made + 1), 1 - beta2 ** (made + 1)
    scale = rate / first / (np.sqrt(new_square / second) + EPSILON)
    change = -scale * new_mean - rate * decay * weight
    mean_bound = 8 * U * (beta1 * np.abs(mean) + np.abs(gradient)) + 1e-37
    relative = U * (24 + 4 * beta1 / (1 - beta1) + 4 * beta2 / (1 - beta2))
    if settings.get("optimizer") == "adamw8bit":
        relative += 1e-2
    stored = 4 * U * (np.abs(weight) + np.abs(change))
    bound = scale * mean_bound + relative * np.abs(scale * new_mean) + stored + rate * 1e-29
    return Change(change, bound, new_mean, mean_bound)
