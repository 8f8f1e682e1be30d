"""Access checks on every route: the key, Host and Origin, and the size of the body."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from typing import Any
from urllib.parse import urlsplit

from agentrig_grpo.server.protocol import ApiError

ANY_HOST = ("", "0.0.0.0")
BODY_LIMIT = 8 << 20
"""Most bytes of a request's body; more where a model's context is very long, see `body_limit`."""
DRAINED = 64 << 20
"""Most bytes of a refused body that are read and dropped, so that the client can read the error response."""


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
        headers = scope["headers"]
        refusal = self._refusal(headers)
        connection = scope.get("agentrig.connection")
        if refusal is None and connection is not None:
            connection.prove()
        body, more = await self._body(receive, keep=refusal is None)
        if body is None:
            return  # the client has gone
        if refusal is None and more:
            refusal = ApiError(
                f"the body is larger than {self._limit >> 20} MiB, the most that this server takes: shorten the prompt",
                status=413,
                code="request_too_large",
            )
        if refusal is not None:
            await _refuse(refusal, send)
            return
        given = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Any:
            return given.pop() if given else await receive()

        await self._app(scope, again, send)

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

    async def _body(self, receive: Any, *, keep: bool) -> tuple[bytes | None, bool]:
        """Return the body (None if the client hung up first), and whether it was more than the limit."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None, False
            size += len(message["body"])
            if keep and size <= self._limit:
                parts.append(message["body"])
            else:
                parts.clear()
            if not message["more_body"] or size > DRAINED:
                return b"".join(parts), size > self._limit


def _bearer(value: bytes) -> bytes:
    """Return an Authorization header with its scheme in lower case."""
    scheme, _, token = value.partition(b" ")
    return scheme.lower() + b" " + token.strip()


async def _refuse(error: ApiError, send: Any) -> None:
    body = error.body()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
