"""The listener: one port of this process, with an address and a key for each rollout that is under way."""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import attrs

from agentrig.endpoints import address_of
from agentrig.errors import AgentrigError

if TYPE_CHECKING:
    from agentrig.http_server import Receive, Scope, Send

BODY_LIMIT = 16 << 20
"""Most bytes of a request's body."""

MOST = 1024
"""Most connections."""

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
        from agentrig.http_server import Access, ServerThread, listen

        try:
            listener = listen(host)
        except OSError as error:
            raise AgentrigError(
                f"no callbacks can be taken: this machine cannot listen on {host} ({error.strerror or error}); name "
                "an address of this machine"
            ) from None
        port = listener.getsockname()[1]
        self.url = address_of(host, port, name)
        self._doors: dict[str, tuple[str, Take]] = {}
        self._ended: OrderedDict[str, tuple[str, Take]] = OrderedDict()
        app = Access(self._app, self._admit, host=host, port=port, name=name, limit=BODY_LIMIT)
        self._server = ServerThread(app, listener, "callbacks", most=MOST)

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

    def _admit(self, scope: Scope) -> bool:
        from agentrig.http_server import Refused, bearer, same

        if scope["method"] != "POST":
            raise Refused("an answer is posted: send POST", status=405)
        path = scope["path"].removeprefix("/")
        door = self._doors.get(path) or self._ended.get(path)
        if door is None:
            text = "no rollout is under way at this address: it has ended, or the address is wrong"
            raise Refused(text, status=410)
        if not same(bearer(scope), door[0]):
            raise Refused("this address asks for its own key: send `Authorization: Bearer KEY`", status=401)
        scope["agentrig.take"] = door[1]
        return True

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        from agentrig.http_server import Refused, reply

        try:
            value = json.loads((await receive())["body"], parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise Refused(f"the body is no JSON: {error}") from None
        status, answer = scope["agentrig.take"](value)
        await reply(send, status, dict(answer), {"connection": "close"} if status >= 400 else None)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no value of JSON")
