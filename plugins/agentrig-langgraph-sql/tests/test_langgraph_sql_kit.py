"""The kit on this plugin's own agent."""

from __future__ import annotations

import pytest

from agentrig.testing import Check, checks


@pytest.mark.parametrize(
    "check", checks("agent", "langgraph-sql", tasks="mini-sql", limit=2, script="SELECT 1", slow_s=0.3), ids=str
)
def test_the_kit(check: Check) -> None:
    check()
