"""The task sets `mini-sql` and `spider`."""

from __future__ import annotations

from collections.abc import Iterable

from agentrig import TasksSpec
from agentrig_spider.tasks.mini_sql import MiniSql, MiniSqlConfig


def specs() -> Iterable[TasksSpec]:
    """Return the specs of `mini-sql` and `spider`."""
    return (
        TasksSpec(
            name="mini-sql",
            summary="Small generated databases over 19 domains, templated questions; nothing to download.",
            config=MiniSqlConfig,
            build=MiniSql,
        ),
    )
