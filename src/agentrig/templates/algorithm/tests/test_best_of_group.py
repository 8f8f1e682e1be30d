"""Runs the checks of `agentrig.testing` on `best-of-group`, and a test of its own."""

import attrs
import pytest
from agentrig_best_of_group import best_rollouts

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
    """What `best_rollouts` reads of a rollout."""

    group: str
    value: float | None


def test_the_best_above_the_mean_are_imitated() -> None:
    rollouts = [Result("a", v) for v in (0.0, 1.0, None, 0.5)] + [Result("b", 1.0), Result("b", 1.0)]
    assert best_rollouts(rollouts, 0.5) == {1}
    assert best_rollouts(rollouts, 1.0) == {1}
    assert best_rollouts([Result("a", 0.0), Result("a", 0.9), Result("a", 1.0)], 1.0) == {1, 2}
