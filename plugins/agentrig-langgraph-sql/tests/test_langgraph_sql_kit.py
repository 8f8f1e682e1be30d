"""The kit on this plugin's own agent."""

from __future__ import annotations

import pytest

from agentrig.testing import Check, checks

CHECKS = checks("agent", "langgraph-sql", tasks="mini-sql", limit=2, script="SELECT 1", slow_s=0.3)
LONG = ("agent.slow-server", "agent.together")


@pytest.mark.parametrize(
    "check", [pytest.param(c, id=str(c), marks=[pytest.mark.slow] * (str(c) in LONG)) for c in CHECKS]
)
def test_the_kit(check: Check) -> None:
    check()
