"""Starts the live page: on loopback, with a random token in its link."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrig.errors import AgentrigError
from agentrig.view.watch.app import make_app


@contextmanager
def serving(place: Path, port: int = 0) -> Iterator[str]:
    """Serve the page of a run directory, or of a folder of them, in a thread; yields the link.

    Args:
        place: The directory.
        port: On 127.0.0.1; 0 for any free one.

    Raises:
        AgentrigError: There is no such folder, or the port is taken.
    """
    from agentrig.http_server import ServerThread

    token = secrets.token_urlsafe(24)
    app = make_app(place, token)
    door = socket.socket()
    door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        door.bind(("127.0.0.1", port))
        door.listen(128)  # requests before the server is ready wait
    except OSError as error:
        door.close()
        raise AgentrigError(f"port {port} on this machine can't be used: {error.strerror}. Leave --port out") from None
    server = ServerThread(app, door, "watch", log_level="critical", timeout_graceful_shutdown=1)
    try:
        yield f"http://127.0.0.1:{door.getsockname()[1]}/{token}/"
    finally:
        server.stop()
