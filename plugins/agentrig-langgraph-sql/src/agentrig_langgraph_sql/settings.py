"""The keys of `langgraph-sql`."""

from __future__ import annotations

import attrs

from agentrig import setting
from agentrig_langgraph_sql.prompts import PRESETS, Prompts
from agentrig_langgraph_sql.schema import STYLES


@attrs.frozen(kw_only=True)
class SqlAgentConfig:
    """Settings of `langgraph-sql`."""

    # 33 turns are 99 nodes, one less than the graph's recursion limit.
    max_turns: int = setting(3, help="full cycles of write, execute and check", ge=1, le=33)
    prompts: str = setting(
        "full", help="full for instruct models; short for the starting model of mini", choices=tuple(PRESETS)
    )
    schema_style: str = setting(
        "auto", help="form of the schema; auto is the form that the prompts expect", choices=("auto", *STYLES)
    )
    table_info_truncate: int = setting(2048, help="greatest length of the schema, in characters", ge=64)
    sample_rows: int = setting(
        0, help="rows of each table that are shown with the schema, within its length", ge=0, le=3
    )
    execution_truncate: int = setting(2048, help="greatest length of a query's result, in characters", ge=64)
    # Otherwise a model with long replies would fill its own context, and the call would fail.
    reply_truncate: int = setting(
        4096, help="greatest length of a query or of a check's remarks in the next prompt, in characters", ge=64
    )
    max_tokens: int = setting(2048, help="most new tokens per call; the endpoint may set a lower limit", ge=1)
    query_timeout_s: float = setting(5.0, help="time limit of a query, in seconds", gt=0)
    max_rows: int = setting(1000, help="most rows of a result that are fetched", ge=1)
    timeout: float = setting(600.0, help="of ChatOpenAI: time limit of each attempt of a call, in seconds", gt=0)
    max_retries: int = setting(
        2, help="of ChatOpenAI: further attempts of a call that failed in the network or at an overloaded server", ge=0
    )

    def preset(self) -> Prompts:
        """Return the preset of prompts, with the schema's form as set."""
        preset = PRESETS[self.prompts]
        return preset if self.schema_style == "auto" else attrs.evolve(preset, schema_style=self.schema_style)
