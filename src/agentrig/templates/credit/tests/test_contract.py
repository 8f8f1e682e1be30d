"""Runs the checks of `agentrig.testing` on `upper-share`."""

import pytest

from agentrig.testing import Check, checks


@pytest.mark.parametrize("check", checks("credit", "upper-share"), ids=str)
def test_the_contract(check: Check) -> None:
    check()
