"""A real HTTP server that answers every POST with the very bytes that a test gave it, chunk by chunk."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ByteServer(ThreadingHTTPServer):
    """Sends `chunks` as the chunks of a chunked reply; `cut` leaves out the last one, as a server that dies does."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = 200
        self.chunks: Sequence[bytes] = ()
        self.headers: Mapping[str, str] = {}
        self.cut = False
        self.posts = 0

    @property
    def url(self) -> str:
        """The base URL; ends in /v1."""
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients may hang up."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: ByteServer

    def log_message(self, *args: Any) -> None:
        """Stay quiet."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.server.posts += 1
        self.send_response(self.server.status)
        for name, value in {"content-type": "text/event-stream", **self.server.headers}.items():
            self.send_header(name, value)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for chunk in self.server.chunks:
            if chunk:
                self.wfile.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
                self.wfile.flush()
        if self.server.cut:
            self.close_connection = True
        else:
            self.wfile.write(b"0\r\n\r\n")


@contextmanager
def byte_server() -> Iterator[ByteServer]:
    """Serve in a thread."""
    server = ByteServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
