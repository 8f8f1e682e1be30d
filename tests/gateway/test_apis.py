"""The APIs of the gateway, whole and streamed, through the clients that agents use; and what does not map."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from agentrig import Endpoint
from agentrig.gateway.client import GatewayAttempt
from agentrig.gateway.messages import Messages
from agentrig.gateway.process import Gateway
from agentrig.gateway.responses import Responses
from agentrig.gateway.settings import GatewaySettings
from agentrig.testing.scripted import Reply, ScriptedServer, logprob, prompt_ids, scripted_server
from agentrig.traces import Span

openai = pytest.importorskip("openai")

CALLS = Reply(text="Well, né", tool_calls=[("add", {"a": 2}), ("ask", {"who": "Zoë"})])
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
SCHEMA = {"name": "answer", "schema": {"type": "object"}, "strict": True}


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with Gateway(GatewaySettings()) as running:
        yield running


@pytest.fixture
def model() -> Iterator[ScriptedServer]:
    with scripted_server(CALLS) as server:
        yield server


@pytest.fixture
def visit(gateway: Gateway) -> GatewayAttempt:
    return GatewayAttempt(gateway.address, "r")


def exact(span: Span, reply: Reply) -> None:
    """Check the ids and the text of a call: they are the server's, whatever API the client spoke."""
    found = span.attributes
    assert span.error is None
    assert found["prompt_token_ids"] == prompt_ids(found["request"])
    assert found["response_token_ids"] == reply.ids
    assert found["response_logprobs"] == [logprob(t, i) for i, t in enumerate(reply.ids)]
    (choice,) = found["response"]["choices"]
    assert (choice["message"], choice["finish_reason"]) == (reply.message, reply.ended)
    assert "token_ids" not in choice
    assert "logprobs" not in choice


def test_streamed_chat_completions_lose_what_the_client_did_not_ask_for(
    visit: GatewayAttempt, model: ScriptedServer
) -> None:
    endpoint = visit.open(1, model.endpoint(temperature=0.5))
    with openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client:

        def ask(**more: Any) -> list[Any]:
            messages = [{"role": "user", "content": "?"}]
            options = {"stream_options": {"include_usage": True}, **more}
            return list(client.chat.completions.create(model="scripted", messages=messages, stream=True, **options))

        plain, own = ask(), ask(logprobs=True, extra_body={"return_token_ids": True})
    said = "".join(c.choices[0].delta.content or "" for c in plain if c.choices)
    assert said == CALLS.text
    assert all(
        "token_ids" not in choice.model_dump() and choice.logprobs is None for c in plain for choice in c.choices
    )
    assert all("prompt_token_ids" not in c.model_dump() for c in plain)
    assert [t for c in own for choice in c.choices for t in choice.model_dump().get("token_ids") or ()] == CALLS.ids
    assert sum(len(choice.logprobs.content) for c in own for choice in c.choices if choice.logprobs) == len(CALLS.ids)
    assert plain[-1].usage.completion_tokens == len(CALLS.ids)
    spans = visit.close().spans
    assert len(spans) == 2
    for span in spans:
        exact(span, CALLS)


CONVERSATION: list[Any] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "input_text", "text": "2+2"}, {"type": "input_text", "text": "?"}]},
    {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 2}'},
    {"type": "function_call_output", "call_id": "c1", "output": "4"},
]
ASKED = [
    {"role": "system", "content": "You add."},
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2\n?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "4"},
]


def test_responses_whole_and_streamed(visit: GatewayAttempt, model: ScriptedServer) -> None:
    endpoint = visit.open(1, model.endpoint(temperature=0.5))
    fields: dict[str, Any] = {
        "model": "scripted",
        "instructions": "You add.",
        "input": CONVERSATION,
        "tools": [{"type": "function", "name": "add", "parameters": PARAMETERS, "strict": True}],
        "tool_choice": {"type": "function", "name": "add"},
        "text": {"format": {"type": "json_schema", **SCHEMA}},
        "max_output_tokens": 50,
    }
    with openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client:
        whole = client.responses.create(**fields)
        events = list(client.responses.create(**fields, stream=True))
    streamed = events[-1].response
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == CALLS.text
    for response in (whole, streamed):
        text, *calls = response.output
        assert response.output_text == text.content[0].text == CALLS.text
        assert [(c.name, json.loads(c.arguments)) for c in calls] == list(CALLS.tool_calls)
        assert [c.call_id for c in calls] == ["call_1", "call_2"]
        assert (response.status, response.usage.output_tokens) == ("completed", len(CALLS.ids))
    spans = visit.close().spans
    for span in spans:
        exact(span, CALLS)
        request = span.attributes["request"]
        assert request["messages"] == ASKED
        function = {"name": "add", "parameters": PARAMETERS, "strict": True}
        assert request["tools"] == [{"type": "function", "function": function}]
        assert request["tool_choice"] == {"type": "function", "function": {"name": "add"}}
        assert request["response_format"] == {"type": "json_schema", "json_schema": SCHEMA}
        assert (request["max_tokens"], request["temperature"]) == (50, 0.5)
    assert [s.attributes["request"].get("stream") for s in spans] == [None, True]


def messages_call(endpoint: Endpoint, **more: Any) -> httpx.Response:
    body = {
        "model": "scripted",
        "max_tokens": 50,
        "system": [{"type": "text", "text": "You add."}, {"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 2}}]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "4"}]},
                    {"type": "text", "text": "So?"},
                ],
            },
        ],
        "tools": [{"name": "add", "description": "Adds.", "input_schema": PARAMETERS}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "stop_sequences": ["END"],
        "metadata": {"user_id": "u"},
        **more,
    }
    url = endpoint.base_url.removesuffix("/v1") + "/v1/messages"  # as Anthropic's SDK builds it
    return httpx.post(url, json=body, headers={"x-api-key": endpoint.api_key}, timeout=30)


def test_messages_whole_and_streamed(visit: GatewayAttempt, model: ScriptedServer) -> None:
    endpoint = visit.open(1, model.endpoint(temperature=0.5))
    whole = messages_call(endpoint).json()
    lines = messages_call(endpoint, stream=True).text.split("\n\n")
    events = [json.loads(line.partition("data: ")[2]) for line in lines if line]
    text, *calls = whole["content"]
    assert text == {"type": "text", "text": CALLS.text}
    assert [(c["type"], c["name"], c["input"]) for c in calls] == [("tool_use", n, a) for n, a in CALLS.tool_calls]
    usage = {"input_tokens": len(prompt_ids(model.bodies()[0])), "output_tokens": len(CALLS.ids)}
    assert (whole["stop_reason"], whole["usage"]) == ("tool_use", usage)

    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            key = "text" if delta["type"] == "text_delta" else "json"
            blocks[event["index"]][key] += delta.get("text") or delta.get("partial_json")
    read = [{**b, "input": json.loads(b.pop("json"))} if b["type"] == "tool_use" else b for b in blocks]
    assert [{k: v for k, v in b.items() if k != "json"} for b in read] == whole["content"]
    assert [e["type"] for e in events[:2]] == ["message_start", "content_block_start"]
    assert events[-1] == {"type": "message_stop"}
    assert (events[-2]["delta"]["stop_reason"], events[-2]["usage"]) == ("tool_use", usage)

    spans = visit.close().spans
    assert len(spans) == 2
    for span in spans:
        exact(span, CALLS)
        request = span.attributes["request"]
        assert [m["role"] for m in request["messages"]] == ["system", "user", "assistant", "tool", "user"]
        assert [m["content"] for m in request["messages"]] == ["You add.\nBe brief.", "2+2?", None, "4", "So?"]
        assert (request["tool_choice"], request["parallel_tool_calls"]) == ("required", False)
        assert (request["stop"], request["user"], request["max_tokens"]) == (["END"], "u", 50)


@pytest.mark.parametrize(
    ("route", "fields", "named"),
    [
        ("responses", {"input": "?", "previous_response_id": "resp_1"}, "got no response 'resp_1'"),
        ("responses", {"input": "?", "tools": [{"type": "web_search"}]}, "web_search"),
        ("responses", {"input": "?", "background": True}, "background"),
        ("responses", {"input": "?", "n": 2}, "the field n"),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input_file"),
        ("responses", {"input": 3}, "input must be a list"),
        ("responses", {}, "input is missing"),
        (
            "responses",
            {"input": "?", "tools": [{"type": "function", "function": {"name": "a"}}]},
            "tools[0].name is mis",
        ),
        ("messages", {}, "messages is missing"),
        ("messages", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content must be a list"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "document"),
        ("messages", {"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}]}, "thinking"),
        ("messages", {"messages": [], "tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
        ("messages", {"messages": [], "mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ],
)
def test_what_does_not_map_is_said_in_the_api_s_own_form(
    visit: GatewayAttempt, model: ScriptedServer, route: str, fields: dict[str, Any], named: str
) -> None:
    endpoint = visit.open(1, model.endpoint())
    headers = {"authorization": f"Bearer {endpoint.api_key}"}
    answer = httpx.post(f"{endpoint.base_url}/{route}", json={"model": "scripted", **fields}, headers=headers)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert named in error["message"]
    assert error["type"] == "invalid_request_error"
    assert ("type" in answer.json()) == (route == "messages")
    (span,) = visit.close().spans
    assert named in str(span.error)
    assert model.requests == []


USER = {"role": "user", "content": "?"}
FUNCTION = {"type": "function", "function": {"name": "a"}}


def post(endpoint: Endpoint, route: str, **fields: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {endpoint.api_key}"}
    body = {"model": "scripted", **fields}
    return httpx.post(f"{endpoint.base_url}/{route}", json=body, headers=headers, timeout=30)


@pytest.mark.parametrize(
    ("route", "fields", "path"),
    [
        ("chat/completions", {"messages": [USER, {**USER, "banana": 1}]}, "messages[1].banana"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "?", "banana": 1}]}]},
            "messages[0].content[0].banana",
        ),
        ("chat/completions", {"messages": [USER], "stream_options": {"banana": 1}}, "stream_options.banana"),
        ("chat/completions", {"messages": [USER], "tools": [{**FUNCTION, "banana": 1}]}, "tools[0].banana"),
        ("chat/completions", {"messages": [USER], "top_logprobs": 2}, "top_logprobs"),
        ("responses", {"input": [{**USER, "banana": 1}]}, "input[0].banana"),
        ("responses", {"input": "?", "text": {"banana": 1}}, "text.banana"),
        ("messages", {"messages": [{**USER, "banana": 1}]}, "messages[0].banana"),
        ("messages", {"messages": [USER], "tool_choice": {"type": "auto", "banana": 1}}, "tool_choice.banana"),
    ],
)
def test_a_field_below_the_top_level_that_nobody_knows_is_refused_by_its_path(
    visit: GatewayAttempt, model: ScriptedServer, route: str, fields: dict[str, Any], path: str
) -> None:
    answer = post(visit.open(1, model.endpoint()), route, **fields)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert path in error["message"]
    assert error.get("param", path) == path
    assert model.requests == []
    visit.close()


def test_what_has_no_effect_is_listed_in_the_span_and_not_sent(visit: GatewayAttempt, model: ScriptedServer) -> None:
    endpoint, cache = visit.open(1, model.endpoint()), {"cache_control": {"type": "ephemeral"}}
    part = {"type": "text", "text": "?", **cache}
    cached = [{"role": "user", "content": [part]}]
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "no", "is_error": True}
    tools = [{**FUNCTION, **cache}]
    assert post(endpoint, "chat/completions", messages=cached, tools=tools, store=True).status_code == 200
    assert post(endpoint, "chat/completions", messages=[USER], store=False).status_code == 200
    assert post(endpoint, "messages", messages=[*cached, {"role": "user", "content": [result]}]).status_code == 200
    assert post(endpoint, "responses", input="?", text={"verbosity": "low"}).status_code == 200
    ignored = [span.attributes.get("agentrig.ignored") for span in visit.close().spans]
    assert ignored == [["cache_control", "store"], None, ["cache_control", "is_error"], ["verbosity"]]
    for body in model.bodies():
        assert "cache_control" not in str(body)
        assert "store" not in body


def test_every_message_and_tool_call_has_its_place_in_the_agent_s_body() -> None:
    body: dict[str, Any] = {
        "instructions": "a",
        "input": [*CONVERSATION, {"role": "assistant", "content": "x"},
                  {"type": "function_call", "call_id": "c2", "name": "b", "arguments": "{}"},
                  {"type": "function_call", "call_id": "c3", "name": "c", "arguments": "{}"}, USER],
    }  # fmt: skip
    asked, places = Responses().asked(body, {})
    found = [places[f"messages[{i}]"] for i in range(len(asked["messages"]))]
    assert found == ["instructions", "input[0]", "input[1]", "input[2]", "input[3]", "input[4]", "input[7]"]
    calls = [(i, j) for i, m in enumerate(asked["messages"]) for j, _ in enumerate(m.get("tool_calls", ()))]
    named = [Responses().named(f"messages[{i}].tool_calls[{j}].function.arguments", places) for i, j in calls]
    assert named == ["input[2].arguments", "input[5].arguments", "input[6].arguments"]

    use = {"type": "tool_use", "id": "c1", "name": "add", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "4"}
    body = {
        "system": "a",
        "messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "x"}, use]},
                     {"role": "user", "content": [result, {"type": "text", "text": "y"}]},
                     {"role": "user", "content": [result]}, USER],
    }  # fmt: skip
    asked, places = Messages().asked(body, {})
    found = [Messages().named(f"messages[{i}]", places) for i in range(len(asked["messages"]))]
    assert found == ["system", "messages[0]", "messages[1]", "messages[2].content[0]", "messages[2]",
                     "messages[3].content[0]", "messages[4]"]  # fmt: skip
    call = Messages().named("messages[2].tool_calls[0].function.arguments", places)
    assert call == "messages[1].content[1].input"
