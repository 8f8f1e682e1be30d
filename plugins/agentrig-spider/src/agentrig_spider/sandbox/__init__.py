"""Runs one query on one SQLite file: read-only, with limits of time and memory, whatever the query is.

The rewards and the SQL agent both use `run_query`. `query` decides where a query runs, `connection` runs it in
this process, `pool` and `worker` in another process that can be killed; `guard` defines what a query may do.
"""

from __future__ import annotations

from agentrig_spider.sandbox.connection import (
    Fetched,
    Fingerprint,
    QueryFailed,
    Row,
    fingerprint,
    is_damage,
    open_read_only,
    read_only_uri,
)
from agentrig_spider.sandbox.pool import WorkersBusy
from agentrig_spider.sandbox.query import (
    HEAP_BYTES,
    MAX_RESULT_BYTES,
    NeedsWorker,
    QueryLimits,
    QueryTimeout,
    QueryTooLarge,
    WorkerDied,
    damage,
    run_query,
)

__all__ = [
    "HEAP_BYTES",
    "MAX_RESULT_BYTES",
    "Fetched",
    "Fingerprint",
    "NeedsWorker",
    "QueryFailed",
    "QueryLimits",
    "QueryTimeout",
    "QueryTooLarge",
    "Row",
    "WorkerDied",
    "WorkersBusy",
    "damage",
    "fingerprint",
    "is_damage",
    "open_read_only",
    "read_only_uri",
    "run_query",
]
