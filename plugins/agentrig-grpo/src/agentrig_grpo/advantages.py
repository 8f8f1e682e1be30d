"""Group-relative advantages: how much better a rollout did than the others of its task."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence

from agentrig.errors import AgentrigError

EPSILON = 1e-6
LARGEST = 1e12
"""Largest reward, without its sign, that is learned from: the squares of such numbers still fit into fp32."""


def group_advantages(
    groups: Sequence[str], values: Sequence[float | None], *, scale: bool = False, negative_scale: float = 1.0
) -> list[float | None]:
    """Return each rollout's advantage over its group.

    The baseline is the mean over the group's rollouts that have a value; a rollout counts once,
    however many LLM calls it made. Failures (value None) have no part in it and get no advantage.
    A rollout without company has nothing to be compared with: its advantage is 0.

    With `scale` the difference is divided by the group's standard deviation (n - 1 in the
    denominator, plus 1e-6), as in DeepSeekMath (arXiv:2402.03300, section 4.1.2); without, it is
    Dr. GRPO's (arXiv:2503.20783), which does not favour tasks that are almost always or almost
    never solved.

    Args:
        groups: Each rollout's group.
        values: Each rollout's reward, None for a failure.
        scale: Divide by the standard deviation.
        negative_scale: Negative advantages are multiplied by this.

    Returns:
        Advantages in the order of the rollouts; None for failures.

    Raises:
        AgentrigError: A reward is larger than `LARGEST`, or is no number.
    """
    members: dict[str, list[float]] = defaultdict(list)
    for place, (group, value) in enumerate(zip(groups, values, strict=True)):
        if value is not None:
            if not abs(value) <= LARGEST:
                raise AgentrigError(
                    f"rollout {place} of this step, of group {group}, has the reward {value:g}; the loss is computed "
                    f"in fp32, where rewards beyond {LARGEST:g} overflow. Scale the reward: most lie between 0 and 1"
                )
            members[group].append(value)
    baseline = {group: math.fsum(held) / len(held) for group, held in members.items()}
    spread = {group: statistics.stdev(held) if len(held) > 1 else 0.0 for group, held in members.items()}
    advantages: list[float | None] = []
    for group, value in zip(groups, values, strict=True):
        if value is None:
            advantages.append(None)
            continue
        advantage = value - baseline[group]
        if len(set(members[group])) == 1:
            advantage = 0.0  # exactly: rounding in the mean must not make a gradient
        if scale:
            advantage /= spread[group] + EPSILON
        advantages.append(advantage * negative_scale if advantage < 0 else advantage)
    return advantages
