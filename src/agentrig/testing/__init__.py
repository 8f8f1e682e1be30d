"""The kit: checks that a plugin's author runs on a component, and what they need to do so.

`checks("reward", "my-reward")` gives named checks for pytest; `check("reward", "my-reward")` runs them and reports.
"""

from __future__ import annotations

from agentrig.testing.kit import Check, Report, Result, check, checks
from agentrig.testing.subject import CheckFailed, CheckSkipped

__all__ = ["Check", "CheckFailed", "CheckSkipped", "Report", "Result", "check", "checks"]
