"""Chat completions that skip vLLM's application, and those that do not. With the stand-in for vLLM."""

import asyncio
import importlib
import json
import sys
from types import SimpleNamespace

import httpx
import pytest

from .conftest import STAND_IN


@pytest.fixture
def chats(monkeypatch):
    monkeypatch.syspath_prepend(STAND_IN)
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm" or name == "agentrig_vllm.chats"]:
        monkeypatch.delitem(sys.modules, name)
    yield importlib.import_module("agentrig_vllm.chats")
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm" or name == "agentrig_vllm.chats"]:
        del sys.modules[name]


class Handler:
    """vLLM's handler: it answers with what it was asked, fails, or takes for ever."""

    def __init__(self, protocol):
        self.protocol, self.cancelled, self.begun = protocol, False, asyncio.Event()

    async def create_chat_completion(self, request):
        text = request.messages[0]["content"]
        if text == "fail":
            raise ValueError("no such template")
        if text == "refuse":
            return SimpleNamespace(error="not a completion")
        if text == "long":
            self.begun.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.cancelled = True
                raise
        return self.protocol.ChatCompletionResponse(text=text, logprobs=[-0.1234567890123456, -2.0])


async def app(scope, receive, send):
    """vLLM's application: it answers with the body that reached it."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    await send({"type": "http.response.start", "status": 418, "headers": []})
    await send({"type": "http.response.body", "body": b"app:" + body})


def made(chats):
    handler = Handler(importlib.import_module("vllm.entrypoints.openai.chat_completion.protocol"))
    return handler, chats.Chats(app, SimpleNamespace(openai_serving_chat=handler))


def post(middleware, body, path="/v1/chat/completions", **headers):
    async def ask():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(middleware), base_url="http://x") as client:
            given = {"content-type": "application/json", **headers}
            return await client.post(path, content=body, headers=given)

    return asyncio.run(ask())


def asked(text, **more):
    return json.dumps({"messages": [{"role": "user", "content": text}], **more})


def test_a_plain_completion_is_the_handlers(chats):
    _, middleware = made(chats)
    answer = post(middleware, asked("hello"))
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {"text": "hello", "logprobs": [-0.1234567890123456, -2.0]}


@pytest.mark.parametrize(
    ("body", "path", "headers"),
    [
        (asked("hello", stream=True), "/v1/chat/completions", {}),
        (asked("hello"), "/v1/completions", {}),
        (asked("hello"), "/v1/chat/completions", {"x-request-id": "7"}),
        (asked("hello"), "/v1/chat/completions", {"content-type": "text/plain"}),
        (asked("fail"), "/v1/chat/completions", {}),
        (asked("refuse"), "/v1/chat/completions", {}),
        ('{"messages": 3}', "/v1/chat/completions", {}),
        ("{", "/v1/chat/completions", {}),
    ],
)
def test_everything_else_is_the_applications_with_its_whole_body(chats, body, path, headers):
    _, middleware = made(chats)
    answer = post(middleware, body, path, **headers)
    assert (answer.status_code, answer.text) == (418, "app:" + body)


def test_a_client_that_leaves_ends_its_sampling(chats):
    async def leave():
        handler, middleware = made(chats)
        sent, bodies = [], [asked("long").encode()]  # whole, as `Access` hands it on

        async def receive():
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await handler.begun.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
        await asyncio.wait_for(middleware(scope, receive, send), 10)
        await asyncio.sleep(0)
        return handler.cancelled, sent

    assert asyncio.run(leave()) == (True, [])
