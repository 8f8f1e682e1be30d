"""The algorithm `best-of-group`: imitates the best rollouts of each group, with the learner of `grpo`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import attrs
from agentrig_grpo.config import GrpoConfig

from agentrig import AlgorithmSpec, hookimpl, setting

if TYPE_CHECKING:
    from agentrig.algorithms import Algorithm
    from agentrig.rollouts import Rollout


@attrs.frozen(kw_only=True)
class Config(GrpoConfig):
    """The settings: `[algorithm]` of a run file; those of `grpo`, and one more."""

    best: float = setting(
        0.5, help="share of a group that is imitated: at most so many, and none below the mean", gt=0, le=1
    )


def build(config: Config) -> Algorithm:
    """Build the algorithm. torch is imported here, not when the plugin is loaded."""
    from agentrig_grpo.algorithm import Grpo

    class BestOfGroup(Grpo):
        """`samples` is what differs from `grpo`: which calls are trained, and with which advantage."""

        def samples(self, rollouts: Sequence[Rollout]) -> list[Any]:
            """Return the calls of the imitated rollouts; each counts the same."""
            imitated = best_rollouts(rollouts, config.best)
            return [attrs.evolve(s, advantage=1.0) for s in super().samples(rollouts) if s.rollout in imitated]

    return BestOfGroup(config)


def best_rollouts(rollouts: Sequence[Rollout], share: float) -> set[int]:
    """Return the places of the rollouts that are imitated: the best of each group, if they are above its mean."""
    groups: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for place, rollout in enumerate(rollouts):
        if rollout.value is not None:  # a failure is no result of the model
            groups[rollout.group].append((rollout.value, place))
    found: set[int] = set()
    for group in groups.values():
        mean = sum(value for value, _ in group) / len(group)
        best = sorted(group, key=lambda one: (-one[0], one[1]))[: max(1, int(share * len(group)))]
        found.update(place for value, place in best if value > mean)
    return found


@hookimpl
def register_algorithms() -> Iterable[AlgorithmSpec]:
    """Bring `best-of-group`."""
    yield AlgorithmSpec(
        name="best-of-group",
        summary="Imitates the best rollouts of each group.",
        config=Config,
        build=build,
        server=True,
    )
