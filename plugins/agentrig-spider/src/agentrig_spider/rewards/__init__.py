"""The execution-match rewards `spider-exec` and `spider-exec-strict`, and `ExecMatch` for use on its own."""

from __future__ import annotations

from agentrig_spider.rewards.exec_match import ExecMatch
from agentrig_spider.rewards.specs import ExecMatchReward, specs

__all__ = ["ExecMatch", "ExecMatchReward", "specs"]
