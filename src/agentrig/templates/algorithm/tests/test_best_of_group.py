"""Runs the checks of `agentrig.testing` on `best-of-group`, and a test of its own."""

from typing import Any

import attrs
import pytest
from agentrig_best_of_group import Config, best_of_group

from agentrig.testing import Check, checks

BANDIT = {"lr": 1e-2, "tasks_per_step": 6, "group_size": 8, "max_tokens": 2, "validate_every": 0}
"""Settings for the kit's bandit, a task of one answer with a tiny model."""

CHECKS = checks(
    "algorithm",
    "best-of-group",
    settings=BANDIT,
    learns=16,
    variants=[{"lora_rank": 4}],
    overrides=["hardware.threads=1"],
)
SLOW = ("keys-read", "serves", "solves")
"""Checks that make further runs: `pytest -m slow`."""


@pytest.mark.parametrize("check", [c for c in CHECKS if not c.name.endswith(SLOW)], ids=str)
def test_the_contract(check: Check) -> None:
    check()


@pytest.mark.slow
@pytest.mark.parametrize("check", [c for c in CHECKS if c.name.endswith(SLOW)], ids=str)
def test_the_contract_in_further_runs(check: Check) -> None:
    check()


@attrs.frozen
class Result:
    """What `best_of_group` reads of a rollout."""

    value: float | None


def test_the_best_above_the_mean_are_imitated() -> None:
    groups: Any = [[Result(v) for v in values] for values in ([0.0, 1.0, None, 0.5], [1.0, 1.0], [0.0, 0.9, 1.0])]
    assert list(best_of_group(groups, Config())) == [[None, 1.0, None, None], [None, None], [None, None, 1.0]]
    assert list(best_of_group(groups, Config(best=1.0)))[2] == [None, 1.0, 1.0]
