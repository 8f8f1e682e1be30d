from __future__ import annotations

from pathlib import Path

from agentrig_langgraph_sql.agent import SqlAgent, SqlAgentConfig

from agentrig.pools import Job
from agentrig.runners.attempt import run_agent
from agentrig.testing.scripted import ScriptedServer, logprob, prompt_ids, serving

REPLIES = ["```sql\nSELECT 1\n```", "VERDICT: INCORRECT", "```sql\nSELECT 2\n```", "VERDICT: CORRECT"]


def test_every_call_is_recorded_under_its_node_with_its_token_ids(zoo: Path) -> None:
    task = {"question": "How many?", "db_id": "zoo", "database": str(zoo)}
    with serving(ScriptedServer(REPLIES)) as server:
        job = Job(id="r", input=task, endpoint=server.endpoint(temperature=1.0))
        result = run_agent(SqlAgent(SqlAgentConfig()), job)
        bodies = server.bodies()
    assert result.outcome.answer == "SELECT 2"
    calls = result.trace.llm_calls()
    assert [result.trace.nodes(call)[0] for call in calls] == [
        "write_query",
        "check_query",
        "rewrite_query",
        "check_query",
    ]
    for call, text, body in zip(calls, REPLIES, bodies, strict=True):
        ids = list(text.encode())
        assert call.attributes["prompt_token_ids"] == prompt_ids(body)
        assert call.attributes["response_token_ids"] == ids
        assert call.attributes["response_logprobs"] == [logprob(token, at) for at, token in enumerate(ids)]
        assert call.attributes["request"]["messages"][-1]["role"] == "user"
    outputs = {span.node: span.attributes["output"] for span in result.trace.spans if span.node}
    assert outputs["execute_query"] == {"result": "2\n2"}
    said = [{"role": "assistant", "content": text} for text in REPLIES]
    assert outputs["rewrite_query"] == {"messages": [said[2]], "query": "SELECT 2", "turn": 2}
    assert (outputs["write_query"]["messages"], outputs["check_query"]["messages"]) == ([said[0]], [said[3]])
