"""Runs the checks of `agentrig.testing` on `five-minutes`, and a test of its own."""

import pytest

from agentrig.plan import resolve
from agentrig.testing import Check, checks


@pytest.mark.parametrize("check", checks("recipe", "five-minutes"), ids=str)
def test_the_contract(check: Check) -> None:
    check()


def test_it_resolves() -> None:
    plan = resolve("five-minutes")
    assert plan.components["tasks"].spec.name == "mini-sql"
    assert plan.configs["algorithm"].steps == 24
