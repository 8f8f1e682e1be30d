"""Access to a run's store: every request must have the token; without it, the answer is status 401."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import zlib
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

from agentrig.http_server import App, Receive, Refused, Scope, Send, bearer, replayed, reply, same
from agentrig.text import json_fault, parsed, words_of
from agentrig_lightning.store import client

log = logging.getLogger(__name__)

LIMITS = {"/v1/agentrig/report": 256 << 20, "/v1/agl/spans": 64 << 20, "/v1/traces": 64 << 20}
"""Most bytes of a body with spans, which have the ids of all tokens: a whole rollout as JSON, and what OTLP sends."""

OTHER_LIMIT = 8 << 20

COOKIE = "agentrig-store"
"""The cookie that a browser gets when it opens the dashboard's link."""


class StoreDoor:
    """What a run's store asks for.

    The token comes as a bearer token, or as the password of basic authentication: that is what `http://any:TOKEN@HOST`
    becomes in Agent Lightning's own client, in OpenTelemetry's exporter and in a browser. The dashboard's link has it
    as `?token=`; the answer is a cookie for this server alone and a redirect that forgets the token.
    """

    def __init__(self, app: App, *, token: str) -> None:
        self._app, self._token = app, token

    def admit(self, scope: Scope) -> bool:
        """Refuse a request without the token."""
        if not self._linked(scope) and not any(same(given, self._token) for given in _brought(scope)):
            text = "this store asks for the run's token: the run printed a link with it when it started"
            raise Refused(text, status=401)
        return True

    def _linked(self, scope: Scope) -> bool:
        return same(parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0], self._token)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that has the token."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if self._linked(scope):
            cookie = f"{COOKIE}={self._token}; Path=/; HttpOnly; SameSite=Strict"
            await reply(send, 303, b"", {"location": scope["path"], "set-cookie": cookie, "cache-control": "no-store"})
            return
        who = scope.get("client")
        client.set(who[0] if who else None)
        body, headers = (await receive())["body"], dict(scope["headers"])
        if headers.pop(b"content-encoding", b"").strip().lower() == b"gzip":
            body = _unpacked(body, limit(scope))
            scope = {**scope, "headers": list(headers.items())}
        kind = headers.get(b"content-type", b"")
        if body and kind.startswith(b"application/json") and (why := _not_json(body)):
            raise Refused(why)
        try:
            await self._app(scope, replayed(body, receive), _without_traceback(send))
        except Exception as error:  # Starlette has answered with status 500, and uvicorn would print the stack
            log.warning("a request to %s failed: %s", scope["path"], words_of(error))


def limit(scope: Scope) -> int:
    """Return the most bytes of a request's body, packed or not."""
    return LIMITS.get(scope["path"], OTHER_LIMIT)


def _unpacked(body: bytes, most: int) -> bytes:
    """Return what a body holds that was packed by gzip, and never unpack more than `most` bytes of it."""
    unpacker = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        found = unpacker.decompress(body, most + 1)
    except zlib.error:
        raise Refused("the body is not gzip, as its Content-Encoding says") from None
    if len(found) > most:
        raise Refused(f"the body is longer than the {most >> 20} MiB that this server takes, unpacked", status=413)
    if not unpacker.eof or unpacker.unused_data:
        raise Refused("the body is cut short, or has something after its end (Content-Encoding: gzip)")
    return found


def _not_json(body: bytes) -> str:
    """Say what is wrong with a body, or '': Agent Lightning's server takes NaN, and can't send it back."""
    try:
        value, plain = parsed(body)
    except (ValueError, RecursionError) as error:
        return f"the body {json_fault(error)}"
    try:
        if not plain:  # NaN, or half of a character, which may stay
            json.dumps(value, allow_nan=False)
    except RecursionError as error:
        return f"the body {json_fault(error)}"
    except ValueError:
        return "the body has NaN or an infinity, which JSON can't hold"
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


def _brought(scope: Scope) -> list[str]:
    """Return what a request brought as tokens."""
    headers = {key: value.decode("latin-1") for key, value in scope["headers"]}
    found = [bearer(scope)]
    kind, _, value = headers.get(b"authorization", "").partition(" ")
    if kind.lower() == "basic":
        with contextlib.suppress(ValueError):  # not base64: as if it had brought none
            found.append(base64.b64decode(value, validate=True).decode().partition(":")[2])
    try:
        cookie = SimpleCookie(headers.get(b"cookie", "")).get(COOKIE)
    except CookieError:
        cookie = None
    return [*found, *([cookie.value] if cookie is not None else [])]
