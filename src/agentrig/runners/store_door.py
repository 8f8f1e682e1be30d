"""The door of a run's store: every request brings the token, or it gets nothing but a 401."""

from __future__ import annotations

import base64
import contextlib
import hmac
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextvars import ContextVar
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

COOKIE = "agentrig-store"
"""The cookie that a browser gets when it opens the dashboard's link."""

client: ContextVar[str | None] = ContextVar("client", default=None)
"""The address of the client whose request is handled."""


class StoreDoor:
    """The outermost ASGI application of a run's store.

    The token comes as a bearer token, or as the password of basic authentication: that is what `http://any:TOKEN@HOST`
    becomes in Agent Lightning's own client, in OpenTelemetry's exporter and in a browser. The dashboard's link has it
    as `?token=`; the answer is a cookie for this server alone and a redirect that forgets the token.

    Args:
        app: Gets the requests that brought the token.
        token: The token.
    """

    def __init__(self, app: App, *, token: str) -> None:
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # the store has no websockets
        headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        if self._same(query.get("token", [""])[0]):
            cookie = f"{COOKIE}={self._token.decode()}; Path=/; HttpOnly; SameSite=Strict"
            await _answer(send, 303, {"location": scope["path"], "set-cookie": cookie})
        elif any(self._same(given) for given in _brought(headers)):
            who = scope.get("client")
            client.set(who[0] if who else None)
            await self._app(scope, receive, send)
        else:
            text = b"this store asks for the run's token: the run printed a link with it when it started\n"
            challenge = {"www-authenticate": 'Basic realm="agentrig"', "content-type": "text/plain"}
            await _answer(send, 401, challenge, text)

    def _same(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token)


def _brought(headers: Mapping[str, str]) -> list[str]:
    """Return what a request brought as tokens."""
    found = []
    kind, _, value = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        found.append(value.strip())
    elif kind.lower() == "basic":
        with contextlib.suppress(ValueError):  # not base64: as if it had brought none
            found.append(base64.b64decode(value, validate=True).decode().partition(":")[2])
    try:
        cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        cookie = None
    return [*found, *([cookie.value] if cookie is not None else [])]


async def _answer(send: Send, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
    sent = {**headers, "content-length": str(len(body)), "cache-control": "no-store"}
    encoded = [(key.encode(), value.encode()) for key, value in sent.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
