"""A real HTTP server in a thread: the base of scripted servers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar


class LocalServer(ThreadingHTTPServer):
    """Listens on a port of this machine.

    Args:
        handler: Handles the requests, each connection in a thread.
        port: The port; 0 for a free one.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, handler: type[BaseHTTPRequestHandler], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), handler)

    @property
    def url(self) -> str:
        """The base URL; ends in /v1."""
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of connections: clients that are killed hang up."""


class QuietHandler(BaseHTTPRequestHandler):
    """Keeps connections open, sends at once, and logs nothing."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args: Any) -> None:
        """Stay quiet."""


S = TypeVar("S", bound=LocalServer)


@contextmanager
def serving(server: S) -> Iterator[S]:
    """Serve in a thread until the block ends."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
