"""The agents of examples/agents, with a scripted model server."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from agentrig_spider.rewards import ExecMatch, ExecMatchReward

from agentrig import Endpoint, Task
from agentrig.pools import Job
from agentrig.runners.attempt import run_agent
from agentrig.testing.databases import one_table_database
from agentrig.testing.scripted import Reply, ScriptedServer, serving

AGENTS = Path(__file__).parents[1] / "examples" / "agents"
QUERY = "SELECT count(*) FROM animal"
CALLS = (
    ("sql_db_list_tables", {"tool_input": ""}),
    ("sql_db_schema", {"table_names": "animal"}),
    ("sql_db_query", {"query": QUERY}),
)


def reply(body: Any) -> Reply:
    """Look at the tables, then at a schema, run the query, and end."""
    turn = sum(message["role"] == "assistant" for message in body["messages"])
    if turn == len(CALLS):
        return Reply(text="Done.")
    return Reply(tool_calls=[CALLS[turn]])


TEXTS = {"empty": "", "text": "The answer is 4.", "8000 tokens": "word " * 8000}


@pytest.mark.filterwarnings("ignore:`langchain-community` is being sunset:DeprecationWarning")
@pytest.mark.parametrize("said", [None, *TEXTS])
def test_langchains_sql_toolkit_answers_with_the_last_query_that_it_ran(tmp_path: Path, said: str | None) -> None:
    """A model that replies with text calls no tool, which is an answer without a query and no failure."""
    spec = importlib.util.spec_from_file_location("langchain_sql", AGENTS / "langchain_sql.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (agent,) = module.register_agents()
    task = {"question": "How many animals are there?", "database": str(one_table_database(tmp_path))}
    with serving(ScriptedServer(reply if said is None else lambda body: Reply(text=TEXTS[said]))) as server:
        endpoint = Endpoint(base_url=server.url, model="scripted", sampling={"temperature": 1.0}, token_ids=True)
        result = run_agent(agent.build(None), Job(id="r", input=task, endpoint=endpoint))
    calls = result.trace.llm_calls()
    turns = len(CALLS) + 1 if said is None else 1
    assert (result.outcome.failure, result.outcome.answer) == (None, "" if said else QUERY), result.outcome
    assert [result.trace.nodes(call)[0] for call in calls] == ["model"] * turns
    score = ExecMatchReward(ExecMatch())(
        Task(id="t", input=task, private={"gold": QUERY}), result.outcome, 5.0, result.trace
    )
    assert (score.value, score.calls) == ((0.0, (None,)) if said else (1.0, (None, None, 1.0, None)))
    if said is not None:
        return
    assert all(call.attributes["response_token_ids"] for call in calls)
    said = json.dumps(calls[-1].attributes["request"]["messages"])
    assert "CREATE TABLE animal" in said
