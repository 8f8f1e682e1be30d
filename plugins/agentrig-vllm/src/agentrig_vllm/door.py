"""Access to the HTTP server, an ASGI middleware: it checks the key, and refuses requests while there are no weights."""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = frozenset({"/health"})
"""Paths that need no key. vLLM's own check of keys leaves all paths open that do not begin with /v1."""


class Door:
    """Passes a request on if it has the run's key and the server has weights.

    Args:
        app: The application that answers.
        key: The bearer token that every request must have.

    Attributes:
        closed: Why no request is answered now, as a sentence; '' if requests are answered.
    """

    def __init__(self, app: App, key: str) -> None:
        self._app, self._expected = app, f"Bearer {key}".encode()
        self.closed = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] in OPEN):
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name.lower() == b"authorization"), b"")
        if not hmac.compare_digest(given, self._expected):
            await _refuse(scope, send, 401, "this server answers its own run only: the key is missing or wrong")
        elif self.closed:
            await _refuse(scope, send, 503, self.closed)
        else:
            await self._app(scope, receive, send)


async def _refuse(scope: Scope, send: Send, status: int, message: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": message})
        return
    body = json.dumps({"error": {"message": message, "type": "agentrig", "code": status}}).encode()
    await reply(send, status, body)


async def reply(send: Send, status: int, body: bytes) -> None:
    """Send JSON."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
