"""Faults of clients and of the model's server: each ends one call, and the span says how."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from agentrig import Endpoint
from agentrig.gateway.book import CALLS_AT_ONCE
from agentrig.gateway.client import GatewayAttempt, GatewayError
from agentrig.gateway.process import Gateway
from agentrig.gateway.settings import GatewaySettings
from agentrig.processes.servers import ServerError
from agentrig.traces import ABORTED, CUT

EVENT = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"' + b"x" * 4000 + b'"},"token_ids":[7]}]}\n\n'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: 100\r\n\r\n"
NONSENSE = {"list": b"[1]", "page": b"<html>Sign in</html>"}
MOVED = b"HTTP/1.1 302 Found\r\nlocation: /v2/chat/completions\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
MESSAGE = rb'{"role": "assistant", "content": "\ud800"}'
LOGPROBS = b'{"content": [{"logprob": NaN}, {"logprob": -1e-7}]}'
STRANGE = (
    b'{"id": "c", "prompt_token_ids": [2], "choices": [{"index": 0, "token_ids": [7, 8], "finish_reason": "stop", '
)
STRANGE += b'"message": %b, "logprobs": %b}]}' % (MESSAGE, LOGPROBS)
TEXT_IDS = b'{"id": "c", "choices": [{"token_ids": ["7"], "finish_reason": "stop", "message": {"content": "x"}}]}'


class Upstream:
    """A model server of sockets that does what the API key says: `endless`, `silent`, `three` …"""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/v1"
        self.ended, self.written, self.silent = threading.Event(), 0, 0
        threading.Thread(target=self._serve, daemon=True).start()

    def endpoint(self, does: str) -> Endpoint:
        return Endpoint(base_url=self.url, model="m", api_key=does, token_ids=True)

    def _serve(self) -> None:
        while True:
            try:
                connection = self.listener.accept()[0]
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            head = connection.recv(1 << 16).partition(b"Bearer ")[2] or b""
            does = head.split(b"\r\n")[0].decode()
            try:
                if does == "silent":
                    self.silent += 1
                    while connection.recv(1 << 16):
                        pass
                elif does == "endless":
                    connection.sendall(HEAD)
                    while True:
                        connection.sendall(EVENT)
                        self.written += len(EVENT)
                elif does == "three":
                    connection.sendall(HEAD + EVENT * 3)
                elif does == "half":
                    connection.sendall(JSON + b'{"id":')
                elif does in NONSENSE:
                    connection.sendall(JSON + NONSENSE[does].ljust(100))
                elif does == "moved":
                    connection.sendall(MOVED)
                elif does == "text-ids":
                    connection.sendall(JSON + TEXT_IDS.ljust(100))
                elif does == "strange":
                    connection.sendall(JSON.replace(b"100", b"%d" % len(STRANGE)) + STRANGE)
            except OSError:
                pass
            self.ended.set()


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with Gateway(GatewaySettings()) as running:
        yield running


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    server = Upstream()
    yield server
    server.listener.close()


def body_of(**more: object) -> dict[str, object]:
    return {"model": "m", "messages": [{"role": "user", "content": "?"}], **more}


def ask(endpoint: Endpoint, *, timeout_s: float = 30.0, **more: object) -> httpx.Response:
    headers = {"authorization": f"Bearer {endpoint.api_key}"}
    return httpx.post(f"{endpoint.base_url}/chat/completions", json=body_of(**more), headers=headers, timeout=timeout_s)


@pytest.mark.parametrize("does", ["silent", "endless"])
def test_a_client_that_goes_takes_the_upstream_call_with_it(gateway: Gateway, upstream: Upstream, does: str) -> None:
    visit = GatewayAttempt(gateway.address, "r")
    endpoint = visit.open(1, upstream.endpoint(does))
    headers = {"authorization": f"Bearer {endpoint.api_key}"}
    with httpx.Client(timeout=httpx.Timeout(30, read=0.3 if does == "silent" else 30)) as client:
        url = f"{endpoint.base_url}/chat/completions"
        if does == "silent":
            with pytest.raises(httpx.ReadTimeout):
                client.post(url, json=body_of(), headers=headers)
        else:
            with client.stream("POST", url, json=body_of(stream=True), headers=headers) as reply:
                assert next(reply.iter_lines()).startswith("data:")
    assert upstream.ended.wait(10)
    calls = visit.close()
    (span,) = calls.spans
    assert span.error == "the client has broken the connection before the answer was complete"
    assert span.attributes[ABORTED] is True
    assert calls.cut == 0
    assert ("response_token_ids" in span.attributes) == (does == "endless"), "what came before is kept"


@pytest.mark.slow
def test_a_slow_reader_slows_the_upstream_and_its_rollout_s_end_cuts_it(gateway: Gateway, upstream: Upstream) -> None:
    visit, other = GatewayAttempt(gateway.address, "slow"), GatewayAttempt(gateway.address, "other")
    endpoint = visit.open(1, upstream.endpoint("endless"))
    headers = {"authorization": f"Bearer {endpoint.api_key}"}
    url = f"{endpoint.base_url}/chat/completions"
    with httpx.stream("POST", url, json=body_of(stream=True), headers=headers, timeout=30) as reply:
        lines = reply.iter_lines()
        assert next(lines).startswith("data:")
        written = -1
        while written != upstream.written:  # until nothing moves any more: all buffers on the way are full
            written = upstream.written
            assert not upstream.ended.wait(0.5)
        assert written < 64 << 20
        assert ask(other.open(1, upstream.endpoint("three")), stream=True).text.count("data:") == 3
        calls = visit.close()
        assert upstream.ended.wait(10)
        with pytest.raises(httpx.TransportError):
            list(lines)
    assert calls.cut == 1
    assert calls.spans[0].error == "the rollout has ended, and its calls under way with it"
    assert calls.trace("slow").spans[0].attributes == {CUT: 1}
    other.close()


def test_errors_of_the_upstream_are_passed_on_as_such(gateway: Gateway, upstream: Upstream) -> None:
    visit = GatewayAttempt(gateway.address, "r")
    told = []
    for does in ("half", "list", "nothing", "text-ids", "page", "moved"):
        answer = ask(visit.open(1, upstream.endpoint(does)))
        told.append((answer.status_code, answer.json()["error"]["message"], str(visit.close().spans[0].error)))
    assert [status for status, _, _ in told] == [502] * 6
    assert "ClientPayloadError: Response payload is not completed" in told[0][1]
    assert f"{upstream.url} answered no chat completion: HTTP 200 with the body '[1]  " in told[1][1]
    assert "Server disconnected" in told[2][1]
    assert "no chat completion: TypeError: token_ids is no list of token ids" in told[3][1]
    assert "no chat completion: HTTP 200 with the body '<html>Sign in</html>" in told[4][1]
    moved = f"{upstream.url} redirects to {upstream.url.replace('v1', 'v2')} (HTTP 302); set base_url to that address"
    assert told[5][1] == moved
    assert [message for _, message, _ in told] == [error.removeprefix("HTTP 502: ") for _, _, error in told]

    endpoint = visit.open(1, upstream.endpoint("three"))
    assert ask(endpoint, stream=True).text.count("data:") == 3
    (span,) = visit.close().spans
    assert span.error == "the stream ended before the completion did: no finish_reason, no [DONE]"
    assert span.attributes["response_token_ids"] == [7, 7, 7]

    upstream.listener.close()
    answer = ask(visit.open(1, upstream.endpoint("any")))
    assert answer.status_code == 502
    assert upstream.url in answer.json()["error"]["message"]
    visit.close()


def test_what_strict_json_forbids_is_recorded_as_it_came(gateway: Gateway, upstream: Upstream) -> None:
    visit = GatewayAttempt(gateway.address, "r")
    answer = ask(visit.open(1, upstream.endpoint("strange")))
    assert answer.json()["choices"][0]["message"]["content"] == "\ud800"
    (span,) = visit.close().spans
    assert span.attributes["response_token_ids"] == [7, 8]
    assert math.isnan(span.attributes["response_logprobs"][0])
    assert span.attributes["response_logprobs"][1] == -1e-7
    assert span.attributes["request"]["messages"] == body_of()["messages"]


def test_one_rollout_does_not_take_the_places_of_the_others(gateway: Gateway, upstream: Upstream) -> None:
    greedy, modest = GatewayAttempt(gateway.address, "greedy"), GatewayAttempt(gateway.address, "modest")
    endpoint = greedy.open(1, upstream.endpoint("silent"))
    answers: list[httpx.Response] = []
    threads = [
        threading.Thread(target=lambda: answers.append(ask(endpoint)), daemon=True) for _ in range(CALLS_AT_ONCE + 3)
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 20
    while upstream.silent < CALLS_AT_ONCE and time.monotonic() < end:
        time.sleep(0.02)
    assert ask(modest.open(1, upstream.endpoint("three")), stream=True).status_code == 200
    assert upstream.silent == CALLS_AT_ONCE, "the others wait"
    calls = greedy.close()
    for thread in threads:
        thread.join(10)
    assert CALLS_AT_ONCE <= calls.cut <= len(threads), "one that comes later is refused"
    assert [(a.status_code, a.json()["error"]["code"]) for a in answers] == [(410, "rollout_ended")] * len(threads)
    modest.close()


def test_a_gateway_that_died_ends_the_run() -> None:
    with Gateway(GatewaySettings()) as gateway:
        gateway._process._process.kill()  # type: ignore[union-attr]
        gateway._process.wait(10)  # type: ignore[union-attr]
        with pytest.raises(GatewayError, match=r"does not answer.*has the run\s+ended"):
            GatewayAttempt(gateway.address, "r").open(1, Endpoint(base_url="http://127.0.0.1:9/v1", model="m"))
        with pytest.raises(ServerError, match="the gateway has died"):
            gateway.left("r")
