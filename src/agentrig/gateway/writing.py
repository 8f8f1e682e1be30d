"""Writes head and body of an answer at once: two writes would be two system calls, and wake the client twice."""

from __future__ import annotations

import asyncio
from typing import Any


class OneWrite:
    """A transport that writes what it gets within one turn of the event loop at the turn's end.

    Backpressure is the transport's own: it pauses its protocol when it has more than the client reads.

    Args:
        transport: What it stands before; what it does not have itself is that one's.
        loop: The event loop.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._parts: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Write data at the end of this turn of the event loop."""
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)

    def close(self) -> None:
        """Close the connection after what is written."""
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        """Break the connection; what is not written yet is dropped."""
        self._parts.clear()
        self._transport.abort()

    def _flush(self) -> None:
        if self._parts and not self._transport.is_closing():
            data, self._parts = b"".join(self._parts), []
            self._transport.write(data)
