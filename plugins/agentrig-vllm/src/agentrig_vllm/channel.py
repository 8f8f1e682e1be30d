"""Messages between the run and vLLM's process: JSON over a socket pair, which no other process has."""

from __future__ import annotations

import json
from multiprocessing.connection import Connection, Pipe
from typing import Any


class Channel:
    """One end of the connection.

    Args:
        connection: A duplex connection of `multiprocessing`.
    """

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Return two ends that are connected."""
        one, other = Pipe()
        return cls(one), cls(other)

    @classmethod
    def inherited(cls, descriptor: int) -> Channel:
        """Return the end that a parent process has passed on."""
        return cls(Connection(descriptor))

    def fileno(self) -> int:
        """Return its file descriptor."""
        return self._connection.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message.

        Raises:
            OSError: The other end is closed.
        """
        self._connection.send_bytes(json.dumps(message).encode())

    def receive(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """Return the next message; None if there was none in time.

        Raises:
            EOFError, OSError: The other end is closed.
        """
        if timeout_s is not None and not self._connection.poll(timeout_s):
            return None
        found: dict[str, Any] = json.loads(self._connection.recv_bytes())
        return found

    def close(self) -> None:
        """Close this end."""
        self._connection.close()
