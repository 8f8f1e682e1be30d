"""The agent `one-shot`: schema and question in, SQL out, in one call."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from functools import lru_cache
from typing import Any

import agentrig
from agentrig import AgentSpec, Endpoint, hookimpl


@lru_cache(maxsize=64)
def client_of(base_url: str, api_key: str) -> Any:
    """Return a client for a server; kept, because making one takes longer than a call."""
    from openai import OpenAI

    return OpenAI(base_url=base_url, api_key=api_key)


def schema_of(database: str) -> str:
    """Return a line for each table, in the format that the small model of `mini` was trained on."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY rowid").fetchall()
        lines = []
        for (table,) in tables:
            columns = [row[1] for row in connection.execute(f'PRAGMA table_info("{table}")')]
            lines.append(f"table {table}: {' '.join(columns)}")
    return "\n".join(lines)


def one_shot(task_input: Mapping[str, Any], endpoint: Endpoint) -> str:
    """Return the model's SQL."""
    prompt = f"{schema_of(task_input['database'])}\n{task_input['question']}"
    client = client_of(endpoint.base_url, endpoint.api_key)
    with agentrig.span("write_query"):  # so that the adapter's match = "write" finds the call
        reply = client.chat.completions.create(
            model=endpoint.model, messages=[{"role": "user", "content": prompt}], **endpoint.sampling
        )
    return (reply.choices[0].message.content or "").strip()


@hookimpl
def register_agents() -> Iterable[AgentSpec]:
    """Bring `one-shot`."""
    yield AgentSpec(
        name="one-shot",
        summary="Asks for the SQL once, with the OpenAI SDK.",
        build=lambda config: one_shot,
        preload=("openai",),
    )
