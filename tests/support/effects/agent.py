"""The keys of `langgraph-sql`, observed in the agent's requests to a model server, with real databases and queries."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import cache
from typing import Any

import attrs
import openai

from agentrig import AgentFailure, Endpoint
from effects import Flip, Settings, exact, folder
from effects.run import server
from effects.tasks import ENDLESS, build

QUERY = "SELECT name FROM animal"


@attrs.frozen
class Asked:
    """The requests of the agent for one question, and its answer."""

    bodies: Sequence[dict[str, Any]] = attrs.field(repr=False)
    texts: Sequence[str]
    error: str = ""

    @property
    def check(self) -> str:
        """The last message of the second call: the check of what the query returned."""
        return self.texts[1]


@cache
def zoo() -> str:
    """Return a database with a long schema and thirty rows."""
    path = folder() / "animals.sqlite"
    connection = sqlite3.connect(path)
    columns = ", ".join(f"column_{i} TEXT" for i in range(60))
    connection.execute(f"CREATE TABLE animal (name TEXT, {columns})")
    connection.executemany("INSERT INTO animal (name) VALUES (?)", [(f"animal-{i:02d}",) for i in range(30)])
    connection.commit()
    connection.close()
    return str(path)


def ask(reply: str = QUERY, wish: str = "", **beside: Any) -> Any:
    """Return a look: the agent's requests when the model always gives this reply."""

    def look(settings: Settings) -> Asked:
        server().requests.clear()
        agent = build("agent.langgraph-sql", {"max_turns": 1, "max_retries": 0, **beside, **settings})
        question = f"[reply={reply}] {wish}"
        endpoint = Endpoint(base_url=server().url, model="toy-model", sampling={"temperature": 0.0})
        error = ""
        try:
            agent({"question": question, "database": zoo()}, endpoint)
        except (openai.OpenAIError, AgentFailure) as found:
            error = type(found).__name__
        bodies = server().bodies()
        return Asked(bodies, ["\n".join(m["content"] for m in body["messages"]) for body in bodies], error)

    return look


LONG = "SELECT name FROM animal WHERE name <> " + " AND name <> ".join(f"'no such animal {i}'" for i in range(20))
TABLE = {
    "max_turns": exact(1, 3, lambda s: len(ask()(s).bodies), (2, 6)),
    "prompts": Flip(
        a="full",
        b="short",
        look=lambda s: [m["role"] for m in ask()(s).bodies[0]["messages"]],
        shows=lambda a, b: a == ["system", "user"] and b == ["user"],
    ),
    "schema_style": Flip(
        a="create",
        b="compact",
        look=lambda s: ask()(s).texts[0],
        shows=lambda a, b: "CREATE TABLE animal" in a and "animal(name,column_0," in b and "CREATE TABLE" not in b,
    ),
    "table_info_truncate": Flip(
        a=64,
        b=4096,
        look=lambda s: ask()(s).texts[0],
        shows=lambda a, b: "column_59" in b and "column_59" not in a and "1 more tables left out" in a,
    ),
    "sample_rows": Flip(
        a=0,
        b=2,
        look=lambda s: ask(table_info_truncate=8192)(s).texts[0],
        shows=lambda a, b: "rows from animal" not in a and "2 rows from animal table:" in b and "animal-01" in b,
    ),
    "execution_truncate": Flip(
        a=64, b=2048, look=lambda s: ask()(s).check, shows=lambda a, b: "animal-29" in b and "animal-29" not in a
    ),
    "reply_truncate": Flip(
        a=64, b=4096, look=lambda s: ask(LONG)(s).check.count("no such animal 19"), shows=lambda a, b: b == a + 1
    ),
    "max_tokens": exact(7, 8, lambda s: {r["max_completion_tokens"] for r in ask()(s).bodies}, ({7}, {8})),
    "query_timeout_s": Flip(
        a=0.2,
        b=0.7,
        look=lambda s: ask(ENDLESS)(s).check,
        shows=lambda a, b: "stopped after 0.2 s" in a and "stopped after 0.7 s" in b,
    ),
    "max_rows": exact(3, 1000, lambda s: ask()(s).check.count("animal-"), (3, 30)),
    "timeout": Flip(
        a=0.2, b=600.0, look=lambda s: ask(wish="[sleep=0.8]")(s).error, shows=lambda a, b: "Timeout" in a and not b
    ),
    "max_retries": exact(0, 1, lambda s: len(ask(wish="[status=503]")(s).bodies), (1, 2)),
}
