"""Every key of `five-minutes` is one that its components have."""

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
