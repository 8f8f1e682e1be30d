"""Tests what `upper-share` does."""

from typing import Any

import attrs
from agentrig_upper_share import Config, upper_share


@attrs.frozen
class Result:
    """What `upper_share` reads of a rollout."""

    value: float | None


def test_the_best_above_the_mean_are_imitated() -> None:
    groups: Any = [[Result(v) for v in values] for values in ([0.0, 1.0, None, 0.5], [1.0, 1.0], [0.0, 0.9, 1.0])]
    assert list(upper_share(groups, Config())) == [[None, 1.0, None, None], [None, None], [None, None, 1.0]]
    assert list(upper_share(groups, Config(share=1.0)))[2] == [None, 1.0, 1.0]
