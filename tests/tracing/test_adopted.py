"""Calls that another tracer records: the httpx tap adds what that tracer does not see."""

from __future__ import annotations

from model_server import ModelServer
from openai import OpenAI

from agentrig.traces import LLM_CALL, SERVER, Span
from agentrig.tracing.recording import recording


def call_of(response_id: str) -> Span:
    """A call as AgentOps records it: with token ids, and few fields of the request."""
    attributes = {
        "gen_ai.response.id": response_id,
        "prompt_token_ids": [1],
        "response_token_ids": [2],
        "request": {"model": "m"},
    }
    return Span(id="theirs", parent=None, name=LLM_CALL, start=1.0, end=2.0, attributes=attributes)


def test_a_call_gets_its_exact_request_and_is_recorded_once(model: ModelServer) -> None:
    with recording("r", token_ids=True, muted=True, base_url=model.url) as recorder:
        with OpenAI(base_url=model.url, api_key="x") as client:
            reply = client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "?"}], temperature=0.7, extra_body={"top_k": 20}
            )
        assert bytes(reply.choices[0].token_ids) == b"odd", "the other tracer reads the ids in the response"  # type: ignore[attr-defined]
        recorder.adopt([call_of(reply.id)])
        recorder.adopt([call_of(reply.id)])
    (call,) = recorder.trace().llm_calls()
    assert call.parent == recorder.root
    request = call.attributes["request"]
    assert (request["temperature"], request["top_k"], request["messages"][0]["content"]) == (0.7, 20, "?")
    assert call.attributes["response_logprobs"] == [-0.25] * 3
    assert call.attributes["response"]["choices"][0]["message"]["content"] == "odd"


def test_a_call_to_another_server_loses_its_token_ids(model: ModelServer) -> None:
    with recording("r", token_ids=True, muted=True, base_url="http://127.0.0.1:9/v1") as recorder:
        with OpenAI(base_url=model.url, api_key="x") as client:
            reply = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
        recorder.adopt([call_of(reply.id)])
    (call,) = recorder.trace().llm_calls()
    assert call.attributes[SERVER] == model.url.split("//")[1].split("/")[0].replace("127.0.0.1", "localhost")
    assert "response_token_ids" not in call.attributes
