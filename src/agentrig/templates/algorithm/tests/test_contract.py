"""Runs the checks of `agentrig.testing` on `bounded-worths`."""

import pytest

from agentrig.testing import Check, checks

BANDIT = {"lr": 1e-2, "tasks_per_step": 6, "group_size": 8, "max_tokens": 2, "validate_every": 0}
"""Settings for the kit's bandit, a task of one answer with a tiny model."""

CHECKS = checks(
    "algorithm",
    "bounded-worths",
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
