"""Kept connections that a server closes under a call: sent again only if that can help, and on a new connection."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading

import aiohttp
import pytest

from agentrig.gateway.connections import Connections

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
KEPT = 4


class Closing:
    """Answers the first request of each connection; its second one is read, and lost in a given way.

    For the client that is the same as a connection that was closed when it was idle.
    """

    def __init__(self, how: str, kept: int = KEPT) -> None:
        self.how, self.requests, self.connections = how, 0, 0
        self._all_there = threading.Barrier(kept)
        self._first = kept
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection = self.listener.accept()[0]
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(connection, self.connections), daemon=True).start()

    def _serve(self, connection: socket.socket, number: int) -> None:
        with connection:
            self._read(connection)
            if self.how == "always":
                return
            if number <= self._first:
                self._all_there.wait(20)  # so many connections are kept
            connection.sendall(ANSWER)
            if not self._read(connection):
                return
            if self.how == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif self.how == "half":
                connection.sendall(ANSWER[:30])

    def _read(self, connection: socket.socket) -> bool:
        data = b""
        while not data.endswith(b"}"):
            more = connection.recv(4096)
            if not more:
                return False
            data += more
        self.requests += 1
        return True


async def ask(connections: Connections, url: str) -> bytes:
    async with await connections.post(url, b"{}", {}) as response:
        return await response.read()


async def ask_after(server: Closing) -> bytes:
    """Keep some connections open, and then ask once more."""
    connections = Connections()
    try:
        assert await asyncio.gather(*(ask(connections, server.url) for _ in range(KEPT))) == [b"ok"] * KEPT
        return await ask(connections, server.url)
    finally:
        await connections.close()


@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_call_that_a_kept_connection_lost_is_sent_once_more_on_a_new_one(how: str) -> None:
    server = Closing(how)
    with server.listener:
        assert asyncio.run(ask_after(server)) == b"ok"
    assert (server.requests, server.connections) == (KEPT + 2, KEPT + 1)


def test_a_call_whose_answer_had_begun_is_not_sent_again() -> None:
    server = Closing("half")
    with server.listener, pytest.raises(aiohttp.ClientError):
        asyncio.run(ask_after(server))
    assert (server.requests, server.connections) == (KEPT + 1, KEPT)


def test_a_call_that_a_new_connection_lost_is_not_sent_again() -> None:
    async def once(server: Closing) -> None:
        connections = Connections()
        try:
            await ask(connections, server.url)
        finally:
            await connections.close()

    server = Closing("always")
    with server.listener, pytest.raises(aiohttp.ServerDisconnectedError):
        asyncio.run(once(server))
    assert server.requests == 1
