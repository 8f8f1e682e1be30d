"""The kit: checks that a plugin's author runs on a component, and what they need to do so.

`checks("reward", "my-reward")` gives named checks for pytest; `check_reward("my-reward")` runs them and gives a report.
"""

from __future__ import annotations

from agentrig.testing.adapter import check_adapter
from agentrig.testing.agent import check_agent
from agentrig.testing.algorithm import check_algorithm
from agentrig.testing.checks import Check, CheckFailed, ChecksFailed, CheckSkipped, Report, Result
from agentrig.testing.hardware import check_hardware
from agentrig.testing.kit import check, checks
from agentrig.testing.observer import check_observer
from agentrig.testing.recipe import check_recipe
from agentrig.testing.reward import check_reward
from agentrig.testing.runners import check_runners
from agentrig.testing.server import check_server
from agentrig.testing.tasks import check_tasks

__all__ = [
    "Check",
    "CheckFailed",
    "CheckSkipped",
    "ChecksFailed",
    "Report",
    "Result",
    "check",
    "check_adapter",
    "check_agent",
    "check_algorithm",
    "check_hardware",
    "check_observer",
    "check_recipe",
    "check_reward",
    "check_runners",
    "check_server",
    "check_tasks",
    "checks",
]
