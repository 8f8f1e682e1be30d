"""Tests `best-of-group`."""

import attrs
from agentrig_best_of_group import best_rollouts


@attrs.frozen
class Result:
    """What `best_rollouts` reads of a rollout."""

    group: str
    value: float | None


def test_the_best_above_the_mean_are_imitated() -> None:
    rollouts = [Result("a", v) for v in (0.0, 1.0, None, 0.5)] + [Result("b", 1.0), Result("b", 1.0)]
    assert best_rollouts(rollouts, 0.5) == {1}
    assert best_rollouts(rollouts, 1.0) == {1}
    assert best_rollouts([Result("a", 0.0), Result("a", 0.9), Result("a", 1.0)], 1.0) == {1, 2}
