"""The listener: one port of this process, with an address and a key for each rollout that is under way."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import attrs

from agentrig.errors import AgentrigError

if TYPE_CHECKING:
    from agentrig.http_server import Receive, Scope, Send

BODY_LIMIT = 16 << 20
"""Most bytes of a request's body."""

MOST = 1024
"""Most connections."""

ANY_HOST = ("0.0.0.0", "::")

Take = Callable[[Any], tuple[int, Mapping[str, Any]]]
"""Gets the JSON value of a request, in the listener's thread; returns the reply's status and JSON object."""


@attrs.define(eq=False)
class Door:
    """An address that is open until `close`.

    Attributes:
        url: Where to post.
        key: What to send as the bearer token, for this address alone.
    """

    url: str
    key: str = attrs.field(repr=False)
    _path: str = attrs.field(repr=False)
    _listener: Listener = attrs.field(repr=False)

    def close(self, late: Take | None = None) -> None:
        """Refuse whatever comes from now on with status 410.

        Args:
            late: Gets what comes later with the right key, for as long as few others are closed after it.
        """
        self._listener._doors.pop(self._path, None)
        if late is not None:
            ended = self._listener._ended
            ended[self._path] = (self.key, late)
            while len(ended) > MOST:
                ended.popitem(last=False)


class Listener:
    """Takes JSON that is posted to open addresses; everything else is refused, with a reply that says why.

    Args:
        host: The address to listen on.
        name: The host's name in URLs, for clients that reach it by another one; empty for `host`.

    Raises:
        AgentrigError: It cannot listen there.
    """

    _shared: dict[tuple[int, str, str], Listener] = {}  # noqa: RUF012  (by process too: a fork inherits no thread)
    _starting = threading.Lock()

    def __init__(self, host: str = "127.0.0.1", name: str = "") -> None:
        from agentrig.http_server import ServerThread

        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, 0), family=family)
        except OSError as error:
            raise AgentrigError(
                f"no callbacks can be taken: this machine cannot listen on {host} ({error.strerror or error}); name "
                "an address of this machine"
            ) from None
        reached = name or (socket.gethostname() if host in ANY_HOST else host)
        self.url = f"http://{f'[{reached}]' if ':' in reached else reached}:{listener.getsockname()[1]}"
        self._doors: dict[str, tuple[str, Take]] = {}
        self._ended: OrderedDict[str, tuple[str, Take]] = OrderedDict()
        self._server = ServerThread(self._app, listener, "callbacks", most=MOST)

    @classmethod
    def shared(cls, host: str = "127.0.0.1", name: str = "") -> Listener:
        """Return this process's listener for a host; the first call starts it, and it ends with the process."""
        with cls._starting:
            place = (os.getpid(), host, name)
            if place not in cls._shared:
                cls._shared[place] = cls(host, name)
            return cls._shared[place]

    def open(self, path: str, take: Take, key: str = "") -> Door:
        """Open an address.

        Args:
            path: Its path, without a leading slash. It is no secret.
            take: Gets what comes with the right key.
            key: The key; empty for a new one.

        Raises:
            ValueError: It is open already.
        """
        if path in self._doors:
            raise ValueError(f"the callback {path} is open already")
        key = key or secrets.token_urlsafe(24)
        self._ended.pop(path, None)
        self._doors[path] = (key, take)
        return Door(f"{self.url}/{quote(path)}", key, path, self)

    def close(self) -> None:
        """Stop listening."""
        self._server.stop()

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        from agentrig.http_server import reply

        status, value = await self._handled(scope, receive)
        # After a refusal the rest of the body is not read.
        await reply(send, status, dict(value), {"connection": "close"} if status >= 400 else None)

    async def _handled(self, scope: Scope, receive: Receive) -> tuple[int, Mapping[str, Any]]:
        from agentrig.http_server import BodyTooLong, read_body

        if scope["method"] != "POST":
            return _refused(405, "an answer is posted: send POST")
        path = scope["path"].removeprefix("/")
        door = self._doors.get(path) or self._ended.get(path)
        if door is None:
            return _refused(410, "no rollout is under way at this address: it has ended, or the address is wrong")
        key, take = door
        kind, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        if kind.lower() != b"bearer" or not hmac.compare_digest(given.strip(), key.encode()):
            return _refused(401, "this address asks for its own key: send `Authorization: Bearer KEY`")
        scope["agentrig.connection"].prove()
        try:
            value = json.loads(await read_body(receive, BODY_LIMIT) or b"", parse_constant=_refuse_constant)
        except BodyTooLong:
            return _refused(413, f"the body is longer than {BODY_LIMIT >> 20} MiB")
        except (ValueError, RecursionError) as error:
            return _refused(400, f"the body is no JSON: {error}")
        return take(value)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no value of JSON")


def _refused(status: int, why: str) -> tuple[int, Mapping[str, Any]]:
    return status, {"error": why}
