"""Chat completions straight from vLLM's own handler, an ASGI middleware.

FastAPI, its middlewares and its way to JSON take a sixth of the server process's time for a short completion, and that
process is what limits small models: it makes text and log-probabilities of all tokens.
"""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import (  # noqa: TID253  (vLLM's process only)
    ChatCompletionRequest,
    ChatCompletionResponse,
)

from agentrig.http_server import App, Receive, Scope, Send, replayed, reply

PATH = "/v1/chat/completions"

READ = frozenset({b"x-request-id", b"x-data-parallel-rank", b"traceparent", b"endpoint-load-metrics-format"})
"""Headers that vLLM's own route reads; a request with one is its."""


class Chats:
    """Answers a plain chat completion with vLLM's handler; everything else, errors included, is left to vLLM's app."""

    def __init__(self, app: App, state: Any) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http" or scope["path"] != PATH or scope["method"] != "POST" or not _plain(scope):
            await self._app(scope, receive, send)
            return
        body = (await receive())["body"]
        asking = asyncio.create_task(self._answer(body))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait((asking, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                return  # nobody waits for the answer
            answer = asking.result()
        finally:
            for task in (asking, leaving):
                task.cancel()
        if answer is None:
            await self._app(scope, replayed(body, receive), send)
            return
        await reply(send, 200, answer)

    async def _answer(self, body: bytes) -> bytes | None:
        """Return the completion's JSON; None if vLLM's app must answer."""
        try:
            request = ChatCompletionRequest.model_validate_json(body)
        except ValidationError:
            return None
        if request.stream:
            return None
        try:
            found = await self._state.openai_serving_chat.create_chat_completion(request)
        except Exception:  # vLLM's app makes an answer of it
            return None
        return found.model_dump_json().encode() if isinstance(found, ChatCompletionResponse) else None


def _plain(scope: Scope) -> bool:
    """Whether the body is JSON and no header is for vLLM."""
    names = {name.lower(): value for name, value in scope["headers"]}
    return names.get(b"content-type", b"").startswith(b"application/json") and not READ.intersection(names)


async def _left(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
