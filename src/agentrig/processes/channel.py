"""Messages between a run and its server: a pair of sockets that no other process can open."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

MESSAGE_LIMIT = 64 << 20
"""Most bytes of one message: the names and shapes of a model's weights take a few hundred kilobytes."""


class Channel:
    """One end.

    The server inherits its end as a descriptor. Its key, its settings and new weights go over it; weights as a
    descriptor of the memory that holds them, so nothing on this machine has a name that others could use.
    """

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Return two connected ends."""
        ours, theirs = Pipe()
        return cls(ours), cls(theirs)

    @classmethod
    def inherited(cls, descriptor: int) -> Channel:
        """Return the end that this process was started with; not passed on to child processes."""
        os.set_inheritable(descriptor, False)
        return cls(Connection(descriptor))

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._connection.fileno()

    def send(self, message: Mapping[str, Any], *, descriptor: int | None = None) -> None:
        """Send a message, and perhaps a descriptor, which stays open here."""
        self._connection.send_bytes(json.dumps({**message, "descriptor": descriptor is not None}).encode())
        if descriptor is not None:
            send_handle(self._connection, descriptor, None)

    def receive(self, timeout_s: float | None = None) -> tuple[dict[str, Any], int | None]:
        """Return the next message and the descriptor that came with it, which the caller must close.

        Raises:
            EOFError: The other end is closed.
            TimeoutError: Nothing came in time.
            OSError: The channel is broken.
        """
        if not self._connection.poll(timeout_s):
            raise TimeoutError
        message: dict[str, Any] = json.loads(self._connection.recv_bytes(MESSAGE_LIMIT))
        return message, recv_handle(self._connection) if message.pop("descriptor") else None

    def close(self) -> None:
        """Close this end; the other end reads end-of-file."""
        self._connection.close()
