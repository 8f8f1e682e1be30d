"""An agent of one's own in one file: `agentrig train mini --plugin examples/vote_agent.py --agent vote`.

It asks the model three times, runs the three queries, and answers with one whose result most of them agree on.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing

import agentrig
from agentrig import AgentSpec, hookimpl


def schema_of(database):
    """Return a line for each table, in the format that the small model of `mini` was trained on."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        columns = {t: [row[1] for row in connection.execute(f'PRAGMA table_info("{t}")')] for t in tables}
    return "\n".join(f"table {table}: {' '.join(names)}" for table, names in columns.items())


def result_of(database, query):
    """Return a query's rows as text; queries that fail all look alike."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        try:
            return repr(connection.execute(query).fetchmany(50))
        except (sqlite3.Error, sqlite3.Warning):
            return "it fails"


def build(config):
    """Return the agent; what it makes once serves all rollouts."""
    from openai import DefaultHttpxClient, OpenAI

    http = DefaultHttpxClient()  # so that connections are reused

    def vote(task_input, endpoint):
        """Answer a question with SQL. `task_input` is all an agent gets; `endpoint` is the model to ask."""
        prompt = f"{schema_of(task_input['database'])}\n{task_input['question']}"
        client = OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, http_client=http)
        queries = []
        for _ in range(3):
            with agentrig.span("write_query"):  # the name that the adapter looks for
                reply = client.chat.completions.create(
                    model=endpoint.model,
                    messages=[{"role": "user", "content": prompt}],
                    extra_body=dict(endpoint.sampling),
                    extra_headers=dict(endpoint.headers),
                )
            queries.append((reply.choices[0].message.content or "").strip())
        results = {query: result_of(task_input["database"], query) for query in queries}
        winner, _ = Counter(results[query] for query in queries).most_common(1)[0]
        return next(query for query in queries if results[query] == winner)

    return vote


@hookimpl
def register_agents():
    """Register the agent `vote`."""
    yield AgentSpec(name="vote", summary="Asks three times and takes the majority.", build=build)
