"""A real HTTP server that answers every POST with the given bytes, chunk by chunk."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from agentrig.testing.scripted import LocalServer, QuietHandler, serving


class ByteServer(LocalServer):
    """Sends `chunks` as a chunked reply; `cut` leaves out the terminator, like a server that dies, after `pause_s`."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.status = 200
        self.chunks: Sequence[bytes] = ()
        self.headers: Mapping[str, str] = {}
        self.cut = False
        self.pause_s = 0.0
        self.posts = 0


class _Handler(QuietHandler):
    server: ByteServer

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
        time.sleep(self.server.pause_s)
        if self.server.cut:
            self.close_connection = True
        else:
            self.wfile.write(b"0\r\n\r\n")


def byte_server() -> AbstractContextManager[ByteServer]:
    return serving(ByteServer())
