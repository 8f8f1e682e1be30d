"""The checks of a reward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from agentrig.testing.checks import Report
from agentrig.testing.table import Bench, Table


@attrs.define(kw_only=True, eq=False, slots=False)
class RewardBench(Bench):
    """What the checks of a reward share."""


TABLE = Table("reward", RewardBench)


def check_reward(
    subject: Any, *, settings: Any = None, only: Sequence[str] | None = None, raise_failed: bool = True, **options: Any
) -> Report:
    """Run the checks of a reward; see `agentrig.testing.check`."""
    return TABLE.check_all(subject, settings, only, raise_failed, options)
