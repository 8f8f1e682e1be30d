"""Malformed and extreme requests: each is refused immediately with a message, and the server continues."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time

import httpx
import pytest
from agentrig_grpo.config import EmbeddedConfig, GrpoConfig
from agentrig_grpo.server.app import Api
from agentrig_grpo.server.chat import Chat, TooLong
from embedded_servers import embedded, health
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

MESSAGES = [{"role": "user", "content": "select name"}]
BODY = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2}


@pytest.fixture(scope="module")
def server(model_dir):
    with embedded(model_dir, slots=4, max_length=128) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    headers = {"Authorization": f"Bearer {server.api_key}", "Content-Type": "application/json"}
    with httpx.Client(base_url=server.base_url, timeout=60, headers=headers) as made:
        yield made


def body(**change):
    return json.dumps({**BODY, **change}).encode()


def field(name, value):
    """Return a body with a field as raw text, valid JSON or not."""
    rest = json.dumps({k: v for k, v in BODY.items() if k != name})
    return f'{rest[:-1]}, "{name}": {value}}}'.encode()


BAD = {
    "lists 100,000 deep": (b"[" * 100_000 + b"]" * 100_000, None, "nested too deeply"),
    "objects 100,000 deep": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, None, "nested too deeply"),
    "never closed": (b"[" * 100_000, None, "nested too deeply"),
    "deep in a field": (field("metadata", "[" * 500 + "]" * 500), None, "nested too deeply"),
    "many values": (field("metadata", "[" + "0," * 200_000 + "0]"), None, "more than 100000 values"),
    "max_tokens Infinity": (field("max_tokens", "Infinity"), None, "Infinity is no JSON number"),
    "max_tokens NaN": (field("max_tokens", "NaN"), None, "NaN is no JSON number"),
    "max_tokens 1e999": (field("max_tokens", "1e999"), "max_tokens", "max_tokens is inf; it must be finite"),
    "1e999 alone": (b"1e999", None, "the body is inf; it must be finite"),
    "max_tokens 1e300": (field("max_tokens", "1e300"), "messages", "context is 128 tokens"),
    "max_tokens of 4,000 digits": (field("max_tokens", "9" * 4000), "messages", "context is 128 tokens"),
    "max_tokens of 10,000 digits": (field("max_tokens", "9" * 10_000), None, "a whole number of more than 4300 digits"),
    "temperature -1e999": (field("temperature", "-1e999"), "temperature", "must be finite"),
    "seed": (field("seed", "9" * 400), "seed", "characters); it must be between"),
    "n": (field("n", "1e30"), "n", "between 1 and 128"),
    "surrogate in stop": (field("stop", r'"\ud800"'), "stop", r"stop holds a lone surrogate, '\ud800'"),
    "surrogate in stops": (field("stop", r'["a", "b\udfff"]'), "stop[1]", "at character 1"),
    "surrogate in content": (
        field("messages", r'[{"role": "user", "content": "a \udc00"}]'),
        "messages[0].content",
        "lone surrogate",
    ),
    "surrogate in a part": (
        field("messages", r'[{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]'),
        "messages[0].content[0].text",
        "lone surrogate",
    ),
    "surrogate in the model": (field("model", r'"\ud800"'), "model", "lone surrogate"),
    "surrogate in a name": (field(r"\ud800", "1"), "a field's name", "lone surrogate"),
    "surrogate in UTF-8": (field("user", '"PLACE"').replace(b"PLACE", b"\xed\xa0\x80"), None, "not UTF-8"),
    "not UTF-8": (b"\xff\xfe{}", None, "not UTF-8"),
    "UTF-16": (json.dumps(BODY).encode("utf-16"), None, "not UTF-8"),
    "empty": (b"", None, "not JSON"),
    "zero bytes": (b"\0" * 100, None, "not JSON"),
    "long stop": (body(stop="x" * 513), "stop", "each of 1 to 512 characters"),
    "long name of a field": (body(**{"x" * 100_000: 1}), "x" * 100, "unknown field"),
    "long role": (body(messages=[{"role": "x" * 100_000, "content": ""}]), "messages[0].role", "(100002 characters)"),
    "long model": (body(model="x" * 100_000), "model", "does not exist"),
    "long prompt": (body(messages=[{"role": "user", "content": "a b " * 1_000_000}]), "messages", "at least"),
    "spaces": (body(messages=[{"role": "user", "content": " " * 7_000_000}]), "messages", "at least"),
    "letters": (body(messages=[{"role": "user", "content": "é" * 1_200_000}]), "messages", "at least"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_body_is_refused_with_a_message(client, name):
    content, param, words = BAD[name]
    start = time.monotonic()
    response = client.post("/chat/completions", content=content)
    assert response.status_code == (404 if name == "long model" else 400)
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert len(error["message"]) < 5000
    assert time.monotonic() - start < 20
    assert client.post("/chat/completions", json=BODY).status_code == 200


def test_a_pair_of_surrogates_is_text(client):
    content = field("messages", r'[{"role": "user", "content": "\ud83d\ude00"}]')
    assert client.post("/chat/completions", content=content).status_code == 200


def test_prompts_are_tokenized_beside_the_event_loop(tokenizer):
    """While a long prompt is tokenized, other requests are served; a request with the same prompt waits."""
    held, calls = threading.Event(), []

    class Slow(Chat):
        def render(self, conversation, max_length):
            calls.append(threading.current_thread())
            if "slow" in conversation:
                assert held.wait(30)
            return super().render(conversation, max_length)

    api = Api(engine=None, chat=Slow(tokenizer), model="tiny", max_length=128)

    class Asked:
        def __init__(self, text):
            self.messages, self.tools, self.max_tokens = [{"role": "user", "content": text}], [], None
            self.add_generation_prompt, self.continue_final_message = True, False

    async def talk():
        slow = [asyncio.create_task(api._prompt(Asked("slow"))) for _ in range(3)]
        await asyncio.sleep(0.05)
        quick = await asyncio.wait_for(api._prompt(Asked("quick")), 10)
        slow[0].cancel()
        await asyncio.sleep(0)
        held.set()
        _, second, third = await asyncio.gather(*slow, return_exceptions=True)
        assert second == third != quick
        assert await api._prompt(Asked("slow")) == second

    asyncio.run(talk())
    assert len(calls) == 2
    assert threading.main_thread() not in calls


def test_a_prompt_that_is_far_too_long_is_not_tokenized_to_its_end(tokenizer, monkeypatch):
    chat, sizes = Chat(tokenizer), []
    encode = chat._encode
    monkeypatch.setattr(chat, "_encode", lambda text: sizes.append(len(text)) or encode(text))
    long = chat.conversation([{"role": "user", "content": "é " * 500_000}])
    with pytest.raises(TooLong):  # no token has that many characters
        chat.render(long, 128)
    assert sizes == []
    monkeypatch.setattr(chat, "_longest", 1_000_000)
    with pytest.raises(TooLong):  # its start already has twice as many tokens
        chat.render(long, 128)
    assert sizes == [128 * 16]
    ids = chat.render(chat.conversation(MESSAGES), 128)
    assert ids == chat.prompt_ids(MESSAGES)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
FIELDS = [
    *("model", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "n", "seed", "stop"),
    *("logprobs", "top_logprobs", "stream", "stream_options", "return_token_ids", "tools", "tool_choice", "user"),
    *("logit_bias", "response_format"),
]


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=4))
def test_no_json_makes_the_server_fail(client, change):
    response = client.post("/chat/completions", content=json.dumps({**BODY, **change}).encode())
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert response.json()["error"]["type"] == "invalid_request_error"


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.lists(st.fixed_dictionaries({}, optional={"role": json_values, "content": json_values, "name": json_values})))
def test_no_messages_make_the_server_fail(client, messages):
    given = [{"role": "user", "content": "x", **message} for message in messages]
    response = client.post("/chat/completions", content=json.dumps({**BODY, "messages": given}).encode())
    assert response.status_code in (200, 400), response.text


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    st.binary(max_size=200)
    | st.binary(max_size=60).map(lambda b: b"POST /v1/chat/completions HTTP/1.1\r\n" + b + b"\r\n\r\n")
    | st.binary(max_size=60).map(lambda b: b"GET /" + b + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
)
def test_no_bytes_on_a_socket_make_the_server_fail(server, content):
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as line:
        line.sendall(content)
        line.shutdown(socket.SHUT_WR)
        got = b""
        try:
            while part := line.recv(4096):
                got += part
        except ConnectionResetError:
            pass
    assert b" 500 " not in got.split(b"\r\n")[0]
    assert b" 200 " not in got.split(b"\r\n")[0]
    assert health(server)["status"] == "ok"


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (EmbeddedConfig, "threads"),
        (EmbeddedConfig, "batch"),
        (GrpoConfig, "tasks_per_step"),
        (GrpoConfig, "group_size"),
        (GrpoConfig, "lora_rank"),
        (GrpoConfig, "ppo_epochs"),
    ],
)
def test_extreme_settings_are_refused_when_they_are_read(config, name):
    with pytest.raises(ValueError, match=f"'{name}' must be <= "):
        config(**{name: 100_000})
    with pytest.raises(ValueError, match=r"tasks_per_step × group_size is 1024000 rollouts a step; at most 131072"):
        GrpoConfig(tasks_per_step=1000, group_size=1024)
