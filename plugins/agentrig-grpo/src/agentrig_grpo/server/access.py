"""Access checks on every route: the key, Host and Origin, and the size of the body."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from typing import Any
from urllib.parse import urlsplit

from agentrig.http_server import BodyTooLong, read_body, replayed, reply
from agentrig_grpo.server.protocol import ApiError

ANY_HOST = ("", "0.0.0.0")
BODY_LIMIT = 8 << 20
"""Most bytes of a request's body; more where a model's context is very long, see `body_limit`."""


def body_limit(max_length: int) -> int:
    """Return the most bytes of a body for a context in tokens: JSON takes up to 16 for a token of plain text."""
    return max(BODY_LIMIT, 16 * max_length)


class AccessChecks:
    """The outermost ASGI application of the server.

    Args:
        app: Receives accepted requests, each with its complete body.
        key: Every request must have it as its bearer token.
        host: Address that the server listens on.
        port: Port that it listens on.
        limit: Most bytes of a body.
    """

    def __init__(self, app: Any, *, key: str, host: str, port: int, limit: int) -> None:
        self._app, self._token, self._port, self._limit = app, f"bearer {key}".encode(), port, limit
        self._any = host in ANY_HOST
        names = {host, "localhost", "127.0.0.1", "::1", *([socket.gethostname()] if self._any else [])}
        self._names = {name.lower() for name in names if name}

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Pass a request on, or refuse it and close its connection."""
        refusal = self._refusal(scope["headers"])
        if refusal is None:
            scope["agentrig.connection"].prove()
        body: bytes | None = b""
        try:
            body = await read_body(receive, self._limit if refusal is None else 0)
        except BodyTooLong:
            refusal = refusal or ApiError(
                f"the body is larger than {self._limit >> 20} MiB, the most that this server takes: shorten the prompt",
                status=413,
                code="request_too_large",
            )
        if body is None:
            return  # the client has gone
        if refusal is not None:
            challenge = {"www-authenticate": "Bearer"} if refusal.status == 401 else {}
            await reply(send, refusal.status, refusal.body(), {"connection": "close", **challenge})
            return
        await self._app(scope, replayed(body, receive), send)

    def _refusal(self, headers: list[tuple[bytes, bytes]]) -> ApiError | None:
        def values(name: bytes) -> list[bytes]:
            return [value for key, value in headers if key == name]

        hosts = values(b"host")
        if len(hosts) != 1 or not self._own(hosts[0]):
            asked = hosts[0].decode("latin-1") if hosts else "none"
            return ApiError(f"the Host header must name this server; it is {asked!r}", status=403, code="foreign_host")
        for origin in values(b"origin"):
            if not self._own_origin(origin):
                return ApiError(
                    f"web pages may not call this server; the request comes from {origin.decode('latin-1')!r}",
                    status=403,
                    code="foreign_origin",
                )
        keys = values(b"authorization")
        if len(keys) != 1 or not hmac.compare_digest(_bearer(keys[0]), self._token):
            return ApiError(
                "every request must bring the run's key as its bearer token; an agent has it as endpoint.api_key",
                status=401,
                code="invalid_api_key",
            )
        for kind in values(b"content-type"):
            if kind.split(b";")[0].strip().lower() != b"application/json":
                return ApiError(f"send application/json, not {kind.decode('latin-1')!r}", status=415)
        return None

    def _own(self, netloc: bytes) -> bool:
        try:
            name = urlsplit("//" + netloc.decode("ascii")).hostname or ""
        except ValueError:
            return False
        if name in self._names:
            return True
        try:
            # DNS rebinding: a web page whose name points to this machine sends that name, never an address.
            return self._any and bool(ipaddress.ip_address(name))
        except ValueError:
            return False

    def _own_origin(self, origin: bytes) -> bool:
        try:
            parts = urlsplit(origin.decode("ascii"))
            return parts.scheme == "http" and parts.port == self._port and self._own(parts.netloc.encode())
        except ValueError:
            return False


def _bearer(value: bytes) -> bytes:
    """Return an Authorization header with its scheme in lower case."""
    scheme, _, token = value.partition(b" ")
    return scheme.lower() + b" " + token.strip()
