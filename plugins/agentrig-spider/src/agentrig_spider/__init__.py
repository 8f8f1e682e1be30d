"""Text-to-SQL: the tasks `spider` and `mini-sql`, the rewards `spider-exec` and `spider-exec-strict`."""

from __future__ import annotations

from collections.abc import Iterable

from agentrig import RewardSpec, TasksSpec, hookimpl
from agentrig_spider.rewards import ExecMatch

__all__ = ["ExecMatch"]


@hookimpl
def register_tasks() -> Iterable[TasksSpec]:
    """Register `spider` and `mini-sql`."""
    from agentrig_spider.tasks import specs

    return specs()


@hookimpl
def register_rewards() -> Iterable[RewardSpec]:
    """Register `spider-exec` and `spider-exec-strict`."""
    from agentrig_spider.rewards import specs

    return specs()
