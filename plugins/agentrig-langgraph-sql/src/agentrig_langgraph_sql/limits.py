"""The limits of the agent for one question, as keys of `langgraph-sql`."""

from __future__ import annotations

import attrs

from agentrig import setting


@attrs.frozen(kw_only=True)
class Limits:
    """Limits for one question; each field's help says what it is."""

    # 33 turns are 99 nodes, one less than the graph's recursion limit.
    max_turns: int = setting(3, help="full cycles of write, execute and check", ge=1, le=33)
    table_info_truncate: int = setting(2048, help="greatest length of the schema, in characters", ge=64)
    sample_rows: int = setting(
        0, help="rows of each table that are shown with the schema, within its length", ge=0, le=3
    )
    execution_truncate: int = setting(2048, help="greatest length of a query's result, in characters", ge=64)
    # Otherwise a model with long replies would fill its own context, and the call would fail.
    reply_truncate: int = setting(
        4096, help="greatest length of a query or of a check's remarks in the next prompt, in characters", ge=64
    )
    query_timeout_s: float = setting(5.0, help="time limit of a query, in seconds", gt=0)
    max_rows: int = setting(1000, help="most rows of a result that are fetched", ge=1)
