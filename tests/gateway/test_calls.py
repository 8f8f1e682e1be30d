"""Calls through a real gateway process: what is recorded, what the client gets, and what is refused."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from agentrig import Endpoint
from agentrig.gateway import client
from agentrig.gateway.client import GatewayAttempt, GatewayError
from agentrig.gateway.process import Gateway
from agentrig.gateway.settings import GatewaySettings
from agentrig.testing.scripted import Reply, ScriptedServer, logprob, prompt_ids, scripted_server
from agentrig.traces import LLM_CALL

MESSAGES = [{"role": "user", "content": "Grüße?"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with Gateway(GatewaySettings(body_mb=1)) as running:
        yield running


@pytest.fixture
def model() -> Iterator[ScriptedServer]:
    with scripted_server("ok") as server:
        yield server


def opened(
    gateway: Gateway, model: ScriptedServer, rollout: str = "r", attempt: int = 1
) -> tuple[GatewayAttempt, Endpoint]:
    visit = GatewayAttempt(gateway.address, rollout)
    return visit, visit.open(attempt, model.endpoint(temperature=0.7, max_tokens=9))


def post(endpoint: Endpoint, route: str = "chat/completions", headers: Any = None, **body: Any) -> httpx.Response:
    body = {"model": endpoint.model, "messages": MESSAGES, **body}
    given = {"authorization": f"Bearer {endpoint.api_key}", **(headers or {})}
    return httpx.post(f"{endpoint.base_url}/{route}", json=body, headers=given, timeout=30)


def test_a_call_is_recorded_with_the_server_s_ids_and_the_client_gets_none(
    gateway: Gateway, model: ScriptedServer
) -> None:
    model.script = [Reply(text="Hallo"), Reply(tool_calls=[("add", {"a": 2})]), Reply(text="x", status=503)]
    visit, endpoint = opened(gateway, model)
    first = post(endpoint, temperature=0.1, user="u").json()
    assert first["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "Hallo"}, "finish_reason": "stop"}
    ]
    assert "prompt_token_ids" not in first
    format_ = {"type": "json_object"}
    own = post(endpoint, tools=TOOLS, response_format=format_, logprobs=True, return_token_ids=True).json()
    said = Reply(tool_calls=[("add", {"a": 2})])
    assert own["choices"][0]["token_ids"] == said.ids
    assert own["choices"][0]["message"] == said.message
    assert len(own["choices"][0]["logprobs"]["content"]) == len(said.ids)
    failed = post(endpoint, max_completion_tokens=3)
    assert (failed.status_code, failed.json()["error"]["message"]) == (503, "x")
    calls = visit.close()
    spans = calls.spans
    assert [s.name for s in spans] == [LLM_CALL] * 3
    assert calls.cut == 0
    sent = [dict(s.attributes["request"]) for s in spans]
    assert sent[0] == {
        "model": "scripted", "messages": MESSAGES, "user": "u", "temperature": 0.1, "max_tokens": 9,
        "return_token_ids": True, "logprobs": True,
    }  # fmt: skip
    assert (sent[1]["tools"], sent[1]["response_format"], sent[1]["temperature"]) == (TOOLS, format_, 0.7)
    assert "max_tokens" not in sent[2]
    assert sent == model.bodies()
    for span, reply in zip(spans[:2], (Reply(text="Hallo"), said), strict=True):
        found = span.attributes
        assert found["prompt_token_ids"] == prompt_ids(found["request"])
        assert found["response_token_ids"] == reply.ids
        assert found["response_logprobs"] == [logprob(t, i) for i, t in enumerate(reply.ids)]
        assert found["finish_reason"] == reply.ended
        assert found["response"]["choices"][0]["message"] == reply.message
    assert spans[2].error == 'HTTP 503: {"error": {"message": "x", "type": "scripted"}}'


def test_what_is_refused_is_recorded_with_its_reason(gateway: Gateway, model: ScriptedServer) -> None:
    visit, endpoint = opened(gateway, model)
    key = {"authorization": f"Bearer {endpoint.api_key}"}
    url = f"{endpoint.base_url}/chat/completions"
    answers = [
        post(endpoint, "responses", n=2),
        post(endpoint, model="gpt-4"),
        post(endpoint, messages=[{"role": "user", "content": "x" * (1 << 20)}]),
        httpx.post(url, content=b"{", headers=key),
        httpx.post(url, content=b"[]", headers=key),
        httpx.post(url, content=gzip.compress(b"{}"), headers={**key, "content-encoding": "gzip"}),
    ]
    assert [a.status_code for a in answers] == [400, 404, 413, 400, 400, 415]
    assert "Content-Encoding gzip: send it as it is" in answers[5].json()["error"]["message"]
    assert "'scripted'" in answers[1].json()["error"]["message"]
    assert "gateway.body_mb" in answers[2].json()["error"]["message"]
    models = httpx.get(f"{endpoint.base_url}/models", headers=key)
    assert [m["id"] for m in models.json()["data"]] == ["scripted"]
    for name, to in (("scripted", "other"), ("ada", "ada")):
        error = post(endpoint, "embeddings", model=name, input="x").json()["error"]["message"]
        assert f'[gateway.models] "{to}" = {{base_url =' in error
        assert "policy" not in error
    assert [httpx.get(f"{endpoint.base_url}/{name}", headers=key).status_code for name in ("responses", "no")] == [
        405, 404,
    ]  # fmt: skip
    assert model.requests == []
    errors = [str(s.error) for s in visit.close().spans]
    assert [e[:8] for e in errors] == [f"HTTP {status}" for status in (400, 404, 413, 400, 400, 415, 404, 404)]


def test_only_the_key_of_the_open_attempt_is_let_in(gateway: Gateway, model: ScriptedServer) -> None:
    first, former = opened(gateway, model, "ro/1")
    _, other = opened(gateway, model, "ro-2")
    again, endpoint = opened(gateway, model, "ro/1", 2)
    assert former.base_url == endpoint.base_url

    def status(where: Endpoint, key: str) -> tuple[int, str]:
        answer = post(Endpoint(base_url=where.base_url, model="scripted", api_key=key))
        error = answer.json().get("error") or {}
        assert key not in json.dumps(error)
        return answer.status_code, error.get("code", "")

    assert status(endpoint, endpoint.api_key) == (200, "")
    assert status(endpoint, former.api_key) == (410, "rollout_ended")
    assert status(endpoint, other.api_key) == (401, "invalid_api_key")
    assert status(endpoint, "none") == (401, "invalid_api_key")
    assert status(endpoint, gateway.address.token) == (401, "invalid_api_key")
    with pytest.raises(GatewayError, match="410"):
        first.close()
    assert len(again.close().spans) == 1
    assert status(endpoint, endpoint.api_key) == (410, "rollout_ended")
    assert len(model.requests) == 1
    for path in ("open", "close"):
        for key in ("x", other.api_key):
            told = httpx.post(f"{gateway.address.url}/agentrig/{path}", headers={"authorization": f"Bearer {key}"})
            assert told.status_code == 401
    assert gateway.left("ro-2") is not None
    assert gateway.left("ro-2") is None


def test_one_v1_too_many_or_too_few_is_not_a_wrong_key(gateway: Gateway, model: ScriptedServer) -> None:
    """Anthropic's clients add one to the base URL that they are given."""
    visit, endpoint = opened(gateway, model, "ro/1")

    def told(base_url: str, key: str = endpoint.api_key) -> tuple[int, str]:
        answer = post(Endpoint(base_url=base_url, model="scripted", api_key=key))
        return answer.status_code, answer.json().get("error", {}).get("message", "")

    assert told(f"{endpoint.base_url}/v1") == (200, "")
    status, said = told(endpoint.base_url.removesuffix("/v1"))
    assert (status, said.endswith("has none: it is /v1/chat/completions")) == (404, True)
    for base_url in (f"{endpoint.base_url}/v1", endpoint.base_url.removesuffix("/v1")):
        assert told(base_url, "wrong")[0] == 401
    assert len(visit.close().spans) == 1


def test_names_of_parts_and_of_parents(gateway: Gateway, model: ScriptedServer) -> None:
    visit, endpoint = opened(gateway, model)
    post(endpoint, headers={"agentrig-parent": "0123456789abcdef", "agentrig-span": "plan"})
    node, call = visit.close().spans
    assert (node.name, node.node, node.parent) == ("agent", "plan", "0123456789abcdef")
    assert (call.name, call.parent) == (LLM_CALL, node.id)


def ports_to(gateway: Gateway) -> list[int]:
    """Return this process's ports of its connections to a gateway."""
    there = urlsplit(gateway.address.url).port
    return [c.laddr.port for c in psutil.Process().net_connections("tcp") if c.raddr and c.raddr.port == there]


def test_a_runner_keeps_its_connection_and_makes_another_for_one_that_ended(
    model: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Gateway(GatewaySettings()) as first:
        kept = []
        for name in ("a", "b"):
            opened(first, model, name)[0].close()
            kept.append(ports_to(first))
        assert len(kept[0]) == 1
        assert kept[1] == kept[0], "opening and closing take one connection"
        monkeypatch.setattr(client, "IDLE_S", -1.0)
        opened(first, model, "c")
        assert len(ports_to(first)) == 1
        assert ports_to(first) != kept[0], "one that was idle for long is not used again"
        monkeypatch.undo()
        port = urlsplit(first.address.url).port
        assert port is not None
    with Gateway(GatewaySettings(port=port)) as second:
        assert opened(second, model)[0].close().spans == []


def said(gateway: Gateway, *lines: str) -> str:
    """The beginning of the answer to a request's head, with an empty line after it."""
    address = urlsplit(gateway.address.url)
    with socket.create_connection((str(address.hostname), int(address.port or 0)), timeout=30) as line:
        line.sendall("\r\n".join([*lines, "", ""]).encode())
        parts = [line.recv(65536)]
        while part := line.recv(65536):
            parts.append(part)
        return b"".join(parts).decode()


@pytest.mark.parametrize("expect", [True, False])
def test_a_body_that_is_stated_to_be_too_long_is_not_asked_for(
    gateway: Gateway, model: ScriptedServer, expect: bool
) -> None:
    visit, endpoint = opened(gateway, model)
    head = [f"POST {urlsplit(endpoint.base_url).path}/chat/completions HTTP/1.1", "Host: localhost"]
    head += [f"Content-Length: {10 << 30}", *["Expect: 100-continue"] * expect]
    answer = said(gateway, *head, f"Authorization: Bearer {endpoint.api_key}")
    assert answer.startswith("HTTP/1.1 413 ")
    assert "gateway.body_mb" in answer
    assert said(gateway, *head).startswith("HTTP/1.1 401 "), "without the key nothing is asked for either"
    assert [str(s.error)[:8] for s in visit.close().spans] == ["HTTP 413"]


def test_a_body_within_the_limit_is_asked_for(gateway: Gateway, model: ScriptedServer) -> None:
    visit, endpoint = opened(gateway, model)
    address = urlsplit(endpoint.base_url)
    body = json.dumps({"model": "scripted", "messages": MESSAGES})
    head = f"POST {address.path}/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    head += f"Expect: 100-continue\r\nAuthorization: Bearer {endpoint.api_key}\r\n\r\n"
    with socket.create_connection((str(address.hostname), int(address.port or 0)), timeout=30) as line:
        line.sendall(head.encode())
        assert line.recv(65536).startswith(b"HTTP/1.1 100 ")
        line.sendall(body.encode())
        assert line.recv(65536).startswith(b"HTTP/1.1 200 ")
    visit.close()


def test_a_client_that_would_rather_speak_http_2_is_answered(gateway: Gateway, model: ScriptedServer) -> None:
    visit, endpoint = opened(gateway, model)
    upgrade = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAMAAABkAAQAAP__"}
    with httpx.Client(base_url=endpoint.base_url, headers={"authorization": f"Bearer {endpoint.api_key}"}) as line:
        for headers in (upgrade, {}, upgrade):
            answer = line.post("/chat/completions", json={"model": "scripted", "messages": MESSAGES}, headers=headers)
            assert (answer.status_code, answer.http_version) == (200, "HTTP/1.1")
    # The head, and then the body, come in parts, and two requests in one.
    body = json.dumps({"model": "scripted", "messages": MESSAGES})
    head = f"POST {urlsplit(endpoint.base_url).path}/chat/completions HTTP/1.1\r\nHost: localhost\r\nUpgrade: h2c\r\n"
    head += f"Connection: Upgrade\r\nAuthorization: Bearer {endpoint.api_key}\r\nContent-Length: {len(body)}\r\n\r\n"
    address = urlsplit(endpoint.base_url)
    with socket.create_connection((str(address.hostname), int(address.port or 0)), timeout=30) as connection:
        whole = head + body
        for part in (whole[:70], whole[70 : len(head)], whole[len(head) : -5], whole[-5:] + whole + whole):
            connection.sendall(part.encode())
        answers = b""
        while answers.count(b"HTTP/1.1 200 ") < 3:
            more = connection.recv(65536)
            assert more, answers
            answers += more
    assert [s.error for s in visit.close().spans] == [None] * 6
    assert said(gateway, "CONNECT localhost:80 HTTP/1.1", "Host: localhost", "Upgrade: h2c").startswith("HTTP/1.1 400 ")


def test_several_hosts_are_counted(gateway: Gateway) -> None:
    answer = said(gateway, "GET /rollouts/r/v1/models HTTP/1.1", "Host: localhost", "Host: localhost")
    assert answer.startswith("HTTP/1.1 403 ")
    assert "; the request has 2" in answer


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"9" * 5000, "the body has a whole number of more than 4300 digits"),
        (b"[" * 100_000, "the body is nested too deep"),
        (
            json.dumps({"messages": [], "max_tokens": 10**30}).encode(),
            f"the body has {10**29}, a whole number of more than 64 bits",
        ),
        (b'{"messages": [], "temperature": NaN}', "the body has NaN, which is no finite number"),
        (b'{"messages": [], "temperature": -Infinity}', "the body has -Infinity, which is no finite number"),
        (b'{"messages": [], "top_p": 1e999}', "the body has 1e999, which is no finite number"),
    ],
)
def test_what_json_cannot_hold_is_said_in_plain_words(
    gateway: Gateway, model: ScriptedServer, content: bytes, words: str
) -> None:
    visit, endpoint = opened(gateway, model)
    headers = {"authorization": f"Bearer {endpoint.api_key}"}
    answer = httpx.post(f"{endpoint.base_url}/chat/completions", content=content, headers=headers)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, words)
    visit.close()
