"""The HTTP server of every port that a run opens: uvicorn, with limits, and who may come in.

uvicorn itself waits for the rest of a request for ever, and takes WebSockets where a library for them is installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import resource
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agentrig.endpoints import ANY_HOST, RECORDED, UNRECORDED, is_loopback
from agentrig.text import json_fault

SILENCE_S = 5
"""Longest pause inside a request, in turns of about a second."""
ARRIVAL_S = 30
"""Longest time from a connection's or a request's first byte to its last, in turns of about a second."""
HEAD_LIMIT = 64 << 10
"""Most bytes of a request's line and headers."""
MOST = 8192
"""Most connections, where the system allows so many descriptors."""
DRAINED = 64 << 20
"""Most bytes of a body that is too long that are read and dropped, so that the client can read the error."""

CALLS = ("/completions", "/messages", "/responses")
"""How the paths of calls to a model end."""

_REFUSAL = "HTTP/1.1 {}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
TOO_LATE = _REFUSAL.format("408 Request Timeout").encode()
TOO_LONG = _REFUSAL.format("431 Request Header Fields Too Large").encode()

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Refused(Exception):
    """A request that is not answered as asked.

    Args:
        param: The field of the request that is the reason; '' if it is none.
    """

    def __init__(self, message: str, *, status: int = 400, code: str = "", param: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


async def read_body(receive: Receive, limit: int, headers: Mapping[str, str], *, setting: str = "") -> bytes | None:
    """Return the body of a request; None if the client has gone before its end.

    Args:
        headers: The request's, names in lower case.
        setting: The key of a run that sets the limit, or that there is none, for the message.

    Raises:
        Refused: It has more bytes than the limit; up to `DRAINED` of them are read, none if the client waits for
            `100 Continue` or says itself that there are more.
    """
    why = f"the body is longer than the {limit >> 20} MiB that this server takes{f' ({setting})' if setting else ''}"
    too_long = Refused(why, status=413, code="request_too_large")
    length = headers.get("content-length", "")
    stated = int(length[:20]) if length.isdecimal() else 0
    if stated > limit and (stated > max(DRAINED, limit) or headers.get("expect", "").lower() == "100-continue"):
        raise too_long
    parts: list[bytes] = []
    size, more = 0, True
    while more and size <= max(DRAINED, limit):
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        size, more = size + len(message["body"]), message["more_body"]
        parts.append(message["body"])
        if size > limit:
            parts.clear()
    if size > limit:
        raise too_long
    return b"".join(parts)


def packed(headers: Mapping[str, str]) -> Refused | None:
    """Return the refusal of a body that is packed, which only a run's store unpacks; None for a plain one."""
    encoding = headers.get("content-encoding", "identity")
    text = f"the body has the Content-Encoding {encoding:.40}: send it as it is, without that header"
    return Refused(text, status=415, code="unsupported_encoding") if encoding.lower() != "identity" else None


def not_json(error: Exception, headers: Mapping[str, str]) -> Refused:
    """Return the refusal of a body for which `json.loads` raised."""
    return packed(headers) or Refused(f"the body {json_fault(error)}", code="invalid_json")


def headers_of(scope: Scope) -> dict[str, str]:
    """Return the headers of a request, names in lower case."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives a body that was read, and then what comes after it."""
    given = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return given.pop() if given else await receive()

    return again


async def reply(send: Send, status: int, value: Any, headers: Mapping[str, str] | None = None) -> None:
    """Send a value as JSON, or bytes as they are."""
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    sent = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    fields = [(name.encode(), text.encode("latin-1")) for name, text in sent.items()]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})


Form = Callable[[Refused, Scope], Any]
"""Returns what is sent for a refusal: a JSON value, or bytes that are plain text."""


def openai_error(refused: Refused, scope: Scope | None = None) -> dict[str, Any]:
    """Return a refusal in OpenAI's form."""
    kind = {401: "authentication_error", 410: "rollout_ended"}.get(refused.status)
    kind = kind or ("invalid_request_error" if refused.status < 500 else "server_error")
    return {
        "error": {
            "message": str(refused),
            "type": kind,
            "param": refused.param or None,
            "code": refused.code or None,
        }
    }


def bearer(scope: Scope) -> str:
    """Return the bearer token of a request; '' if it brings none, or several."""
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    kind, _, token = (given[0] if len(given) == 1 else b"").decode("latin-1").partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


def same(given: str, key: str) -> bool:
    """Return whether a request brought a key; it takes the same time for every wrong one."""
    return hmac.compare_digest(given.encode(), key.encode())


class Access:
    """The outermost ASGI application of every port that a run opens: lets a request in, or refuses it.

    A request must name this server in Host, and in Origin if it has one: a web page whose own name points to this
    machine sends that name. It must have its key, and a body within the limit.

    Args:
        app: Gets the requests that are let in. What it raises as `Refused`, before it answers, is sent.
        admit: Raises `Refused` for a request without its key. Returns whether it brought one.
        name: A further name by which clients reach the host.
        limit: Most bytes of a body, or what returns them; the application gets it complete. None leaves it to `app`.
        setting: As in `read_body`.
        challenge: What a refusal with status 401 asks for.
    """

    def __init__(
        self,
        app: App,
        admit: Callable[[Scope], bool],
        *,
        host: str,
        port: int,
        name: str = "",
        limit: int | Callable[[Scope], int | None] | None = None,
        setting: str = "",
        form: Form = lambda refused, scope: {"error": str(refused)},
        challenge: str = "Bearer",
    ) -> None:
        self._app, self._admit, self._port, self._limit, self._form = app, admit, port, limit, form
        self._setting, self._challenge = setting, challenge
        self._any, self._machine = host in ANY_HOST, "" if is_loopback(host) else socket.gethostname().lower()
        self._names = {word.lower() for word in (host, name, "localhost", "127.0.0.1", "::1", self._machine) if word}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it and close its connection."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        try:
            self._named(scope)
            if self._admit(scope):
                scope["agentrig.connection"].prove()
        except Refused as refused:
            with contextlib.suppress(Refused):  # it is read, so that the client can read the refusal
                await read_body(receive, 0, headers_of(scope))
            await self._refuse(refused, scope, send)
            return
        try:
            limit = self._limit(scope) if callable(self._limit) else self._limit
            if limit is not None:
                body = await read_body(receive, limit, headers_of(scope), setting=self._setting)
                if body is None:
                    return  # the client has gone
                receive = replayed(body, receive)
            await self._app(scope, receive, send)
        except Refused as refused:
            await self._refuse(refused, scope, send)

    async def _refuse(self, refused: Refused, scope: Scope, send: Send) -> None:
        value, headers = self._form(refused, scope), {"connection": "close"}
        if isinstance(value, bytes):
            headers["content-type"] = "text/plain"
        if refused.status == 401:
            headers["www-authenticate"] = self._challenge
        await reply(send, refused.status, value, headers)

    def _named(self, scope: Scope) -> None:
        """Refuse a request that names another server."""
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or not self._own(hosts[0]):
            own = ", ".join(sorted(self._names)) + (" or an IP address of this machine" if self._any else "")
            there = f"it is {hosts[0]!r:.200}" if len(hosts) == 1 else f"the request has {len(hosts) or 'none'}"
            text = f"the Host header must name this server ({own}); {there}"
            raise Refused(text, status=403, code="foreign_host")
        for origin in (value.decode("latin-1") for name, value in scope["headers"] if name == b"origin"):
            try:
                parts = urlsplit(origin)
                own_page = parts.scheme == "http" and parts.port == self._port and self._own(parts.netloc)
            except ValueError:
                own_page = False
            if not own_page:
                text = f"web pages may not call this server; the request comes from {origin!r:.200}"
                raise Refused(text, status=403, code="foreign_origin")

    def _own(self, netloc: str) -> bool:
        try:
            name = urlsplit(f"//{netloc}").hostname or ""
        except ValueError:
            return False
        if name in self._names or (self._machine and name.startswith(f"{self._machine.partition('.')[0]}.")):
            return True
        try:
            return self._any and bool(ipaddress.ip_address(name))  # a page's name is never an address
        except ValueError:
            return False


class CallCounter:
    """Counts the calls to a model's server that a run neither records nor makes itself; see `unrecorded_calls`.

    Args:
        app: Answers the calls.
    """

    def __init__(self, app: App) -> None:
        self._app, self._calls = app, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer with the number."""
        if scope["type"] == "http" and scope["path"] == f"/v1{UNRECORDED}":
            await reply(send, 200, {"calls": self._calls})
            return
        if scope["type"] == "http" and scope["path"].endswith(CALLS) and RECORDED not in headers_of(scope):
            self._calls += 1
        await self._app(scope, receive, send)


class Connections:
    """The open connections of a server, and which of them have not proven yet that they have the key."""

    def __init__(self, most: int) -> None:
        self._most, self._open = most, 0
        self._strangers: dict[Connection, None] = {}

    def came(self, connection: Connection) -> None:
        """Count a new connection; if there are too many, close the oldest without the key, or this one."""
        self._open += 1
        self._strangers[connection] = None
        if self._open > self._most:
            oldest = next(iter(self._strangers))
            self._strangers.pop(oldest)
            oldest.transport.abort()

    def prove(self, connection: Connection) -> None:
        """Note that a request with the key came over this connection."""
        self._strangers.pop(connection, None)

    def gone(self, connection: Connection) -> None:
        """Remove a connection."""
        self._open -= 1
        self._strangers.pop(connection, None)


class Parser(httptools.HttpRequestParser):
    """Reads a request that asks for another protocol as one that does not: no server here speaks another.

    httptools ends such a request with its head. Java's client asks for `h2c` with every first request.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._connection = connection

    def feed_data(self, data: Any) -> None:
        """Parse bytes; after such a head, parse it again without the header `Upgrade`."""
        while True:
            try:
                super().feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self._connection.upgrades():
                    raise
                data = self._connection.plain_head() + data[upgrade.args[0] :]


class Connection(HttpToolsProtocol):
    """uvicorn's connection, with limits on how long and how large a request's arrival may be.

    Time is counted in turns of the event loop, not read from a clock: while a model computes for a minute nothing is
    read, and that is no fault of those who wait. An application finds the connection as `scope["agentrig.connection"]`.
    """

    def __init__(self, *arguments: Any, connections: Connections, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.parser = Parser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._all = connections
        self._head: int | None = 0  # bytes since a request began, until its headers are complete
        self._arriving, self._begun, self._ticking = True, False, False
        self._turns = self._silent = 0

    def prove(self) -> None:
        """Note that a request with the key came over this connection."""
        self._all.prove(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a new connection."""
        super().connection_made(transport)
        self._all.came(self)
        self._tick()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection."""
        self._arriving = False
        self._all.gone(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes, as long as those of a request's head are not too many."""
        self._silent, self._begun = 0, True
        if self._head is not None:
            self._head += len(data)
        super().data_received(data)
        if self._head is not None and self._head > HEAD_LIMIT:
            self._close(TOO_LONG)
        self._tick()

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self.scope["agentrig.connection"] = self  # type: ignore[typeddict-unknown-key]
        self._arriving, self._turns = True, 0

    def on_headers_complete(self) -> None:
        """Take a request's head."""
        self._head = None
        if not self.upgrades():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """End a request's arrival."""
        if self.upgrades():
            return
        super().on_message_complete()
        self._head, self._arriving, self._begun = 0, False, False

    def upgrades(self) -> bool:
        """Whether the request asks for another protocol in its headers, so that the parser gets its head again."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def plain_head(self) -> bytes:
        """Return the head that was read without the header `Upgrade`."""
        first = b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        lines = [b"%s: %s\r\n" % (name, value) for name, value in self.headers if name != b"upgrade"]
        return b"".join([first, *lines, b"\r\n"])

    def _tick(self) -> None:
        if self._arriving and not self._ticking:
            self._ticking = True
            self.loop.call_later(1, self._turn)

    def _turn(self) -> None:
        self._ticking = False
        if self.transport.is_closing() or not self._arriving:
            return
        self._turns += 1
        if not self.flow.read_paused:  # it is the application that does not read on
            self._silent += 1
        if self._turns >= ARRIVAL_S or (self._begun and self._silent > SILENCE_S):
            self._close(TOO_LATE if self._begun else b"")
        else:
            self._tick()

    def _close(self, answer: bytes) -> None:
        """Answer a request that will not be complete, and close the connection."""
        if not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
                self.transport.write(answer)
            self.transport.close()


class Server(uvicorn.Server):
    """uvicorn's server as a part of a process that has other work: it leaves signals as they are."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle none."""
        yield


class ServerThread:
    """A server in a thread of this process, which listens at once.

    Args:
        listener: A socket that listens; it is closed at the end.
        name: Of the thread.
    """

    def __init__(self, app: Any, listener: socket.socket, name: str, **more: Any) -> None:
        self.port: int = listener.getsockname()[1]
        self._listener, self._server = listener, Server(settings(app, **more))
        serve = partial(self._server.run, sockets=[listener])
        self._thread = threading.Thread(target=serve, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop listening, and wait until the answers under way are sent, or `timeout_graceful_shutdown` is over."""
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()


def settings(app: Any, *, most: int = MOST, **more: Any) -> uvicorn.Config:
    """Return the settings of a server with these limits, without WebSockets and without a log of its requests."""
    quiet = {"log_config": None, "log_level": "error", "access_log": False}
    chosen = {**quiet, "interface": "asgi3", "lifespan": "off", "ws": "none", **more}
    return uvicorn.Config(app, http=partial(Connection, connections=Connections(most)), **chosen)  # type: ignore[arg-type]


def listen(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=1024)
    # asyncio sets it only on sockets made with an explicit protocol; without it head and body of a response wait 40 ms
    # for each other.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # ends those of clients whose machine has gone
    return listener


def most_connections() -> int:
    """Return how many connections this process can hold; asks the system for as many descriptors as it gives."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MOST if hard == resource.RLIM_INFINITY else min(hard, 2 * MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return MOST if soft == resource.RLIM_INFINITY else min(MOST, soft // 2)
