"""Access to the HTTP server, an ASGI middleware: it checks the key, and refuses requests while there are no weights."""

from __future__ import annotations

import hmac

from agentrig.http_server import App, BodyTooLong, Receive, Scope, Send, read_body, replayed, reply

BODY_LIMIT = 64 << 20
"""Most bytes of a request's body: text of a long context, or images."""

OPEN = frozenset({"/health"})
"""Paths that need no key. vLLM's own check of keys leaves all paths open that do not begin with /v1."""


class AccessControl:
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
        if scope["type"] == "lifespan" or scope["path"] in OPEN:
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name.lower() == b"authorization"), b"")
        if not hmac.compare_digest(given, self._expected):
            await _refuse(send, 401, "this server answers its own run only: the key is missing or wrong")
            return
        scope["agentrig.connection"].prove()
        try:
            body = await read_body(receive, BODY_LIMIT)
        except BodyTooLong:
            await _refuse(send, 413, f"the body is longer than {BODY_LIMIT >> 20} MiB: shorten the prompt")
            return
        if self.closed:
            await _refuse(send, 503, self.closed)
        elif body is not None:
            await self._app(scope, replayed(body, receive), send)


async def _refuse(send: Send, status: int, message: str) -> None:
    value = {"error": {"message": message, "type": "agentrig", "code": status}}
    await reply(send, status, value, {"connection": "close"} if status in (401, 413) else None)
