"""A small database of a zoo, and an OpenAI-compatible chat server whose replies the test sets."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlite_files import sqlite_file

from agentrig.testing.scripted import LocalServer, QuietHandler, serving


class ChatServer(LocalServer):
    """Answers each call with the next of `replies` (the last one repeats), or with what a function returns.

    A reply is the message's text; or a status and a body; or a number: seconds to wait before an empty message.
    """

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.replies: Sequence[Any] | Callable[[dict[str, Any]], Any] = ["SELECT 1"]
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.clients: list[int] = []
        self._lock = threading.Lock()

    def answer(self, handler: QuietHandler, request: dict[str, Any]) -> tuple[int, bytes]:
        """Record a request; return the status and the body of its answer."""
        with self._lock:
            number = len(self.requests)
            self.requests.append(request)
            self.paths.append(handler.path)
            self.headers.append({name.lower(): value for name, value in handler.headers.items()})
            self.clients.append(handler.client_address[1])
        reply = self.replies(request) if callable(self.replies) else self.replies[min(number, len(self.replies) - 1)]
        if isinstance(reply, float):
            time.sleep(reply)
            reply = ""
        if isinstance(reply, tuple):
            return reply
        message = {"role": "assistant", "content": reply}
        return 200, json.dumps(
            {
                "id": f"chatcmpl-{number}",
                "object": "chat.completion",
                "created": 1,
                "model": request["model"],
                "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
            }
        ).encode()


class _Handler(QuietHandler):
    server: ChatServer

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, body = self.server.answer(self, request)
        try:
            self.reply(status, body, {} if body[:1] in (b"{", b"[") else {"content-type": "text/html"})
        except OSError:
            self.close_connection = True  # the client has timed out


@pytest.fixture
def chat_server() -> Iterator[ChatServer]:
    with serving(ChatServer()) as server:
        yield server


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    return sqlite_file(
        tmp_path / "zoo.sqlite",
        """
        CREATE TABLE species (id INTEGER PRIMARY KEY, name TEXT, legs INTEGER);
        CREATE TABLE animal (id INTEGER PRIMARY KEY, name TEXT, species_id INT REFERENCES species (id), born INT);
        INSERT INTO species VALUES (1, 'cat', 4), (2, 'crane', 2), (3, 'snake', 0);
        INSERT INTO animal VALUES (1, 'Tom', 1, 2019), (2, 'Ann', 2, 2020), (3, 'Kaa', 3, NULL), (4, 'Leo', 1, 2021);
        """,
    )
