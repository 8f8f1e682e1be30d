"""The door of a run's store: every request brings the token, or it gets nothing but a 401."""

from __future__ import annotations

import base64
import contextlib
import hmac
import json
from collections.abc import Mapping
from contextvars import ContextVar
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

from agentrig.http_server import App, BodyTooLong, Receive, Scope, Send, read_body, replayed, reply
from agentrig.text import parsed, words_of

BODY_LIMIT, OTHER_LIMIT = 256 << 20, 8 << 20
"""Most bytes of a request's body: of a rollout's spans, with the ids of all its tokens, and of anything else."""

WITH_SPANS = ("/v1/agentrig/report", "/v1/agl/spans", "/v1/traces")

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
        headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        if self._same(query.get("token", [""])[0]):
            cookie = f"{COOKIE}={self._token.decode()}; Path=/; HttpOnly; SameSite=Strict"
            await reply(send, 303, b"", {"location": scope["path"], "set-cookie": cookie, "cache-control": "no-store"})
        elif any(self._same(given) for given in _brought(headers)):
            who = scope.get("client")
            client.set(who[0] if who else None)
            scope["agentrig.connection"].prove()
            limit = BODY_LIMIT if scope["path"] in WITH_SPANS else OTHER_LIMIT
            try:
                body = await read_body(receive, limit)
            except BodyTooLong:
                why = f"the body is longer than {limit >> 20} MiB"
                await reply(send, 413, {"error": why}, {"connection": "close"})
                return
            if body and headers.get("content-type", "").startswith("application/json") and (why := _not_json(body)):
                await reply(send, 400, {"error": why})
            elif body is not None:
                await self._app(scope, replayed(body, receive), _without_traceback(send))
        else:
            text = b"this store asks for the run's token: the run printed a link with it when it started\n"
            headers = {"www-authenticate": 'Basic realm="agentrig"', "content-type": "text/plain"}
            await reply(send, 401, text, {**headers, "cache-control": "no-store", "connection": "close"})

    def _same(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token)


def _not_json(body: bytes) -> str:
    """Say what is wrong with a body, or '': Agent Lightning's server takes NaN, and can't send it back."""
    try:
        value, plain = parsed(body)
        if not plain:  # NaN, or half of a character, which may stay
            json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError) as error:
        return f"the body is no JSON: {words_of(error)}"
    return ""


def _without_traceback(send: Send) -> Send:
    """Return a `send` that replaces the body of a status 500, in which Agent Lightning's server has its traceback."""
    failed = False

    async def sent(message: Any) -> None:
        nonlocal failed
        if message["type"] == "http.response.start" and message["status"] == 500:
            failed = True
            await reply(send, 500, {"detail": "Internal server error"})
        elif not failed:
            await send(message)

    return sent


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
