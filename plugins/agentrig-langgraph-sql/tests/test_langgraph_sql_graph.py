from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from agentrig_langgraph_sql.agent import chat_model
from agentrig_langgraph_sql.graph import NotACompletion, Question, build_graph
from agentrig_langgraph_sql.prompts import SHORT
from agentrig_langgraph_sql.schema import schema_text
from agentrig_langgraph_sql.settings import SqlAgentConfig
from langchain_openai import ChatOpenAI

from agentrig import Endpoint

YES, NO = "Fine.\nVERDICT: CORRECT", "The legs are missing.\nVERDICT: INCORRECT"


def sql(query: str) -> str:
    return f"Here:\n```sql\n{query}\n```"


def llm_at(server: Any, **changes: Any) -> ChatOpenAI:
    return ChatOpenAI(**{"base_url": server.url, "model": "zookeeper", "api_key": "none", "max_retries": 0, **changes})


def question_about(zoo: Path) -> Question:
    return Question(question="Which species has most legs?", database=str(zoo))


def said(request: dict[str, Any]) -> str:
    return "\n".join(message["content"] for message in request["messages"])


def test_an_accepted_query_ends_the_first_turn(chat_server: Any, zoo: Path) -> None:
    chat_server.replies = [sql("SELECT name FROM species ORDER BY legs DESC LIMIT 1"), YES]
    graph = build_graph(llm_at(chat_server))
    nodes = [node for update in graph.stream(question_about(zoo), stream_mode="updates") for node in update]
    assert nodes == ["write_query", "execute_query", "check_query"]
    chat_server.requests.clear()
    answer = graph.invoke(question_about(zoo))
    assert answer["query"] == "SELECT name FROM species ORDER BY legs DESC LIMIT 1"
    assert (answer["result"], answer["correct"], answer["turn"]) == ("name\ncat", True, 1)
    assert len(chat_server.requests) == 2


def test_each_node_gets_what_it_needs(chat_server: Any, zoo: Path) -> None:
    chat_server.replies = [sql("SELECT legs FROM specis"), NO, sql("SELECT legs FROM species"), YES]
    build_graph(llm_at(chat_server)).invoke(question_about(zoo))
    write, check, rewrite, again = map(said, chat_server.requests)
    for text in (write, check, rewrite, again):
        assert "Which species has most legs?" in text
        assert "CREATE TABLE species (id INTEGER PRIMARY KEY, name TEXT, legs INTEGER);" in text
        assert "SQLite" in text
        assert "database zoo" in text
    assert "SELECT legs FROM specis\n" in check
    assert "Error: no such table: specis" in check
    assert "Error: no such table: specis" in rewrite
    assert "The legs are missing." in rewrite
    assert "legs\n4\n2\n0" in again


def test_a_rewrite_without_a_block_keeps_the_former_query(chat_server: Any, zoo: Path) -> None:
    chat_server.replies = [sql("SELECT 7"), NO, "I would not change it.", YES]
    answer = build_graph(llm_at(chat_server)).invoke(question_about(zoo))
    assert (answer["query"], answer["turn"]) == ("SELECT 7", 2)


def test_short_replies_are_bare(chat_server: Any, zoo: Path) -> None:
    chat_server.replies = ["SELECT 1", "incorrect", "SELECT name FROM animal LIMIT 1", "correct"]
    answer = build_graph(llm_at(chat_server), prompts=SHORT).invoke(question_about(zoo))
    assert (answer["query"], answer["turn"], answer["correct"]) == ("SELECT name FROM animal LIMIT 1", 2, True)
    assert [len(request["messages"]) for request in chat_server.requests] == [1, 1, 1, 1]
    schema = schema_text(zoo, style=SHORT.schema_style)
    assert [said(request).count(schema) for request in chat_server.requests] == [1, 0, 1, 0]


@pytest.mark.parametrize("empty", ["", None, "  \n"])
def test_an_empty_reply_is_an_empty_query_that_fails(chat_server: Any, zoo: Path, empty: str | None) -> None:
    chat_server.replies = [empty, NO]
    answer = build_graph(llm_at(chat_server), limits=SqlAgentConfig(max_turns=1)).invoke(question_about(zoo))
    assert answer["query"] == ""
    assert "Error: the query is empty" in said(chat_server.requests[1])


def test_the_model_can_come_with_each_call(chat_server: Any, zoo: Path) -> None:
    graph = build_graph()
    chat_server.replies = [sql("SELECT 1"), YES]
    assert graph.invoke(question_about(zoo), context={"llm": llm_at(chat_server, model="one")})["query"] == "SELECT 1"
    graph.invoke(question_about(zoo), context={"llm": llm_at(chat_server, model="two")})
    assert [request["model"] for request in chat_server.requests[:3]] == ["one", "one", "two"]
    with pytest.raises(ValueError, match="built without a model"):
        graph.invoke(question_about(zoo))


def test_sampling_headers_and_key_go_with_every_call(chat_server: Any, zoo: Path) -> None:
    sampling = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 17, "stop": [";"], "seed": 5, "min_p": 0.1}
    endpoint = Endpoint(
        base_url=chat_server.url, model="zookeeper", sampling=sampling, headers={"X-Zoo": "open"}, api_key="sesame"
    )
    chat_server.replies = [sql("SELECT 1"), NO, sql("SELECT 1"), YES]
    build_graph(chat_model(endpoint, max_tokens=99, timeout=5, max_retries=0)).invoke(question_about(zoo))
    assert len(chat_server.requests) == 4
    limit = sampling.pop("max_tokens")
    for request, headers, path in zip(chat_server.requests, chat_server.headers, chat_server.paths, strict=True):
        assert path == "/v1/chat/completions"
        sent = {**sampling, "max_completion_tokens": limit, "model": "zookeeper", "stream": False}
        assert {name: value for name, value in request.items() if name != "messages"} == sent
        assert headers["authorization"] == "Bearer sesame"
        assert headers["x-zoo"] == "open"


def test_connections_are_kept(chat_server: Any, zoo: Path) -> None:
    chat_server.replies = [sql("SELECT 1"), YES]
    graph = build_graph()
    for seed in range(5):
        endpoint = Endpoint(base_url=chat_server.url, model="zookeeper", sampling={"seed": seed})
        llm = chat_model(endpoint, max_tokens=99, timeout=5, max_retries=0)
        graph.invoke(question_about(zoo), context={"llm": llm})
    assert len(set(chat_server.clients)) == 1


@pytest.mark.parametrize(
    "body",
    [
        b"<html>hello</html>",
        b'{"choices": []}',
        b'{"choices": null}',
        b'{"id": "x"}',
        b"{broken",
        b"[]",
        b'{"choices": [{"index": 0}]}',
        b'{"error": {"message": "no such model"}}',
    ],
)
def test_an_answer_that_is_not_a_completion_raises(chat_server: Any, zoo: Path, body: bytes) -> None:
    chat_server.replies = [(200, body)]
    with pytest.raises(NotACompletion, match="not answer with a chat completion"):
        build_graph(llm_at(chat_server)).invoke(question_about(zoo))


TOOL = {"id": "c", "type": "function", "function": {"name": "run", "arguments": '{"query": "SELECT 1"}'}}


@pytest.mark.parametrize(
    ("message", "query"),
    [
        ({"content": None, "tool_calls": [TOOL]}, ""),
        ({"content": [{"type": "text", "text": "SELECT "}, {"type": "text", "text": "1"}]}, "SELECT 1"),
        ({"content": "SELECT " + "1, " * 8000}, ("SELECT " + "1, " * 8000).strip()),
    ],
    ids=["a tool call", "parts", "8000 tokens"],
)
def test_a_reply_may_have_no_text_or_much(chat_server: Any, zoo: Path, message: dict[str, Any], query: str) -> None:
    completion = {"choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", **message}}]}
    chat_server.replies = [(200, json.dumps(completion).encode()), NO]
    answer = build_graph(llm_at(chat_server), limits=SqlAgentConfig(max_turns=1)).invoke(question_about(zoo))
    assert answer["query"] == query
    assert len(said(chat_server.requests[1])) < 8000
