from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentrig_langgraph_sql.agent import SqlAgent, SqlAgentConfig

from agentrig import Endpoint
from agentrig.pools import Job
from agentrig.runners.attempt import run_agent

NO = "VERDICT: INCORRECT"


def with_tokens(request: dict[str, Any], text: str) -> tuple[int, bytes]:
    """Answer as vLLM does if token ids are requested."""
    assert request["return_token_ids"] is True
    logprobs = [{"token": "t", "logprob": -0.5, "bytes": [116], "top_logprobs": []} for _ in text]
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": text},
        "token_ids": [ord(c) for c in text],
        "logprobs": {"content": logprobs},
    }
    body = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    return 200, json.dumps({**body, "prompt_token_ids": [1, 2, 3]}).encode()


def test_every_call_is_recorded_under_its_node_with_its_token_ids(chat_server: Any, zoo: Path) -> None:
    said = iter(["```sql\nSELECT 1\n```", NO, "```sql\nSELECT 2\n```", "VERDICT: CORRECT"])
    texts: list[str] = []

    def reply(request: dict[str, Any]) -> tuple[int, bytes]:
        texts.append(next(said))
        return with_tokens(request, texts[-1])

    chat_server.replies = reply
    task = {"question": "How many?", "db_id": "zoo", "database": str(zoo)}
    endpoint = Endpoint(base_url=chat_server.url, model="m", token_ids=True, sampling={"temperature": 1.0})
    result = run_agent(SqlAgent(SqlAgentConfig()), Job(id="r", input=task, endpoint=endpoint))
    assert result.outcome.answer == "SELECT 2"
    calls = result.trace.llm_calls()
    assert [result.trace.nodes(call)[0] for call in calls] == [
        "write_query",
        "check_query",
        "rewrite_query",
        "check_query",
    ]
    for call, text in zip(calls, texts, strict=True):
        assert call.attributes["prompt_token_ids"] == [1, 2, 3]
        assert call.attributes["response_token_ids"] == [ord(c) for c in text]
        assert call.attributes["response_logprobs"] == [-0.5] * len(text)
        assert call.attributes["request"]["messages"][-1]["role"] == "user"
    outputs = {span.node: span.attributes["output"] for span in result.trace.spans if span.node}
    assert outputs["execute_query"] == {"result": "2\n2"}
    said_then = [{"role": "assistant", "content": "```sql\nSELECT 2\n```"}]
    assert outputs["rewrite_query"] == {"messages": said_then, "query": "SELECT 2", "turn": 2}
