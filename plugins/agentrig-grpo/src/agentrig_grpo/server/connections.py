"""Connections with limits on slow or endless requests; uvicorn has none."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

ARRIVAL_S = 30
"""Longest time from a connection's or a request's first byte to its last, in turns of about a second."""
HEAD_LIMIT = 64 << 10
"""Most bytes of a request's line and headers."""
MOST = 8192
"""Most connections, where the system allows so many descriptors."""
TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class Waiting:
    """The connections of a server, and of them those whose request is still on its way.

    Args:
        most: Most connections.
        arrival_s: See `ARRIVAL_S`.
    """

    def __init__(self, most: int, arrival_s: int = ARRIVAL_S) -> None:
        self._most, self._arrival_s = most, arrival_s
        self._arriving: dict[Connection, int] = {}
        self._strangers: dict[Connection, None] = {}
        self._open = 0

    def came(self, connection: Connection) -> None:
        """Count a new connection; if there are too many, close the oldest without the key, or this one."""
        self._open += 1
        self._arriving[connection] = 0
        self._strangers[connection] = None
        if self._open > self._most:
            oldest = next(iter(self._strangers))
            self._strangers.pop(oldest)
            oldest.transport.abort()

    def prove(self, connection: Connection) -> None:
        """Note that a request with the key came over this connection."""
        self._strangers.pop(connection, None)

    def begins(self, connection: Connection) -> None:
        """Note that a request has begun to arrive."""
        self._arriving.setdefault(connection, 0)

    def arrived(self, connection: Connection) -> None:
        """Note that the whole request is here."""
        self._arriving.pop(connection, None)

    def gone(self, connection: Connection) -> None:
        """Remove a connection."""
        self._open -= 1
        self._arriving.pop(connection, None)
        self._strangers.pop(connection, None)

    async def watch(self) -> None:
        """Keep closing connections whose request takes too long to arrive.

        Time is counted in turns of this loop, not read from a clock: while the model computes for a minute nothing
        is read, and that is no fault of those who wait.
        """
        while True:
            await asyncio.sleep(1)
            for connection, turns in list(self._arriving.items()):
                if turns >= self._arrival_s:
                    connection.transport.abort()
                elif connection in self._arriving:
                    self._arriving[connection] = turns + 1


class Connection(HttpToolsProtocol):
    """uvicorn's connection, with limits on how long and how large a request's arrival may be."""

    def __init__(self, *arguments: Any, waiting: Waiting, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._waiting = waiting
        self._head: int | None = 0  # bytes since a request began, until its headers are complete

    def prove(self) -> None:
        """Note that a request with the key came over this connection."""
        self._waiting.prove(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a new connection."""
        super().connection_made(transport)
        self._waiting.came(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection."""
        self._waiting.gone(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes, as long as those of a request's head are not too many."""
        if self._head is not None:
            self._head += len(data)
        super().data_received(data)
        if self._head is not None and self._head > HEAD_LIMIT and not self.transport.is_closing():
            self.transport.write(TOO_LONG)
            self.transport.close()

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self.scope["agentrig.connection"] = self  # type: ignore[typeddict-unknown-key]
        self._waiting.begins(self)

    def on_headers_complete(self) -> None:
        """Take a request's head."""
        self._head = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """End a request's arrival."""
        super().on_message_complete()
        self._head = 0
        self._waiting.arrived(self)


def most_connections() -> int:
    """Return how many connections this process can hold; asks the system for as many descriptors as it gives."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MOST if hard == resource.RLIM_INFINITY else min(hard, 2 * MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return MOST if soft == resource.RLIM_INFINITY else min(MOST, soft // 2)
