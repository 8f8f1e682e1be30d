"""What a stranger, or a broken client, does to a door of a run: one list for all of them."""

from __future__ import annotations

import contextlib
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import attrs

WAIT_S = 12.0
"""Seconds within which a door must have answered, or closed the connection."""


@attrs.frozen(kw_only=True)
class Door:
    """A door, and how it is entered.

    Attributes:
        port: On 127.0.0.1.
        path: A path that it has.
        header: The header with the key; empty if the key is in the path.
        method: What the path takes.
    """

    port: int
    path: str
    header: str = ""
    method: str = "POST"


def _attacks(door: Door, header: str) -> dict[str, bytes]:
    head = f"{door.method} {door.path} HTTP/1.1\r\nHost: 127.0.0.1:{door.port}\r\n{header}"
    json = "Content-Type: application/json\r\n"
    upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    found = {
        "half a line": head[:9],
        "half a head": head,
        "half a body": f"{head}{json}Content-Length: 100\r\n\r\n{{",
        "half a chunk": f"{head}{json}Transfer-Encoding: chunked\r\n\r\n5\r\n{{",
        "a websocket": f"{head.replace(door.method, 'GET', 1)}{upgrade}{key}",
        "a huge header": f"{head}X-Long: {'x' * (1 << 20)}\r\n\r\n",
        "a huge path": f"GET /{'x' * (1 << 20)} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        "a bad method": f"BREW{head[len(door.method) :]}\r\n",
        "another method": f"PUT{head[len(door.method) :]}Content-Length: 0\r\n\r\n",
        "no HTTP": "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        "a body that is no JSON": f"{head}{json}Content-Length: 3\r\n\r\n{{{{{{",
        "a bad length": f"{head}{json}Content-Length: -5\r\n\r\n{{}}",
        "a bad escape": f"GET /%ff%fe/%00 HTTP/1.1\r\nHost: 127.0.0.1:{door.port}\r\n{header}\r\n",
    }
    sent = {name: text.encode("latin-1") for name, text in found.items()}
    if door.method == "POST":
        sent["a huge body"] = f"{head}{json}Content-Length: {80 << 20}\r\n\r\n".encode() + b" " * (80 << 20)
    return sent


def _said(door: Door, content: bytes) -> tuple[str, float]:
    """Return the first line of what the door answers, '' for nothing, and after how long the connection was free."""
    start, got = time.monotonic(), b""
    with socket.create_connection(("127.0.0.1", door.port), timeout=WAIT_S + 3) as line:
        with contextlib.suppress(OSError):  # it has closed the connection already
            line.sendall(content)
        try:
            while b"\r\n\r\n" not in got and (part := line.recv(65536)):
                got += part
        except ConnectionError:
            pass
        except TimeoutError:
            return "kept", time.monotonic() - start
    return got.split(b"\r\n")[0].decode("latin-1"), time.monotonic() - start


def problems(door: Door) -> list[str]:
    """Attack a door without and with its key; return what went wrong, as sentences."""
    found = []
    cases = [("without the key", ""), *([("with the key", f"{door.header}\r\n")] if door.header else [])]
    work = [(f"{name} {who}", sent) for who, header in cases for name, sent in _attacks(door, header).items()]
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda item: _said(door, item[1]), work))
    for (name, _), (line, seconds) in zip(work, answers, strict=True):
        status = line.partition(" ")[2][:3]
        if line == "kept" or seconds > WAIT_S:
            found.append(f"{name}: the connection was kept for {seconds:.0f} s")
        elif line and not ("400" <= status < "500" or (status == "200" and (door.method == "GET" or "escape" in name))):
            found.append(f"{name}: {line!r}")
        elif "without" in name and "websocket" in name and not line:
            found.append(f"{name}: no answer")
    return found
