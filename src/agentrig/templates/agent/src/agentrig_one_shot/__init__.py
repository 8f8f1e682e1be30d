"""The agent `one-shot`: schema and question in, SQL out, in one call."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from functools import lru_cache
from typing import Any

import attrs

import agentrig
from agentrig import AgentSpec, Endpoint, hookimpl, setting


@attrs.frozen(kw_only=True)
class Config:
    """The settings: `[agent]` of a run file."""

    max_tokens: int = setting(40, help="most tokens of a query", ge=1)


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


@attrs.frozen
class Agent:
    """What `build` returns: called once for each rollout, in several threads at once."""

    config: Config

    def __call__(self, task_input: Mapping[str, Any], endpoint: Endpoint) -> str:
        """Return the model's SQL; an error of the server goes through, and is counted as a failure."""
        prompt = f"{schema_of(task_input['database'])}\n{task_input['question']}"
        client = client_of(endpoint.base_url, endpoint.api_key)
        with agentrig.span("write_query"):  # so that the adapter's match = "write" finds the call
            reply = client.chat.completions.create(
                model=endpoint.model,
                messages=[{"role": "user", "content": prompt}],
                extra_body={"max_tokens": self.config.max_tokens, **endpoint.sampling},
                extra_headers=dict(endpoint.headers),
            )
        return (reply.choices[0].message.content or "").strip()


@hookimpl
def register_agents() -> Iterable[AgentSpec]:
    """Register `one-shot`."""
    yield AgentSpec(
        name="one-shot",
        summary="Asks for the SQL once, with the OpenAI SDK.",
        config=Config,
        build=Agent,
        preload=("openai",),
    )
