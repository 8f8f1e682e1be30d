"""The task sets `mini-sql` and `spider`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from agentrig import TasksSpec
from agentrig_spider.tasks.mini_sql import MiniSql, MiniSqlConfig
from agentrig_spider.tasks.spider import Spider, SpiderConfig


def _convert(source: str, target: str | None) -> str:
    from agentrig_spider.tasks.convert import convert

    return convert(source, target)


def _perturb_command() -> Any:
    from agentrig_spider.perturb import perturb_command

    return perturb_command


def specs() -> Iterable[TasksSpec]:
    """Return the specs of `mini-sql` and `spider`."""
    return (
        TasksSpec(
            name="mini-sql",
            summary="Small generated databases over 19 domains, templated questions; nothing to download.",
            config=MiniSqlConfig,
            build=MiniSql,
        ),
        TasksSpec(
            name="spider",
            summary="Spider 1.0 from its Parquet layout; train, dev and test apart.",
            config=SpiderConfig,
            build=Spider,
            convert=_convert,
            tools={"perturb": _perturb_command},
        ),
    )
