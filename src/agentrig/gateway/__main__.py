"""The gateway's process: `python -m agentrig.gateway DESCRIPTOR`, started by `agentrig.gateway.process.Gateway`.

It gets its settings over the descriptor, answers with its port or an error, and ends when the other end is closed: with
the run, however that ends. It logs nothing about calls: they have keys.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from typing import Any

from agentrig import http_server
from agentrig.processes.channel import Channel
from agentrig.processes.ends import SIGNALS

log = logging.getLogger(__name__)


def main() -> None:
    """Run the gateway's process."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # A terminal and Slurm send these to all processes of a run, whose current step still needs its gateway.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    channel = Channel.inherited(int(sys.argv[1]))
    settings, _ = channel.receive()
    try:
        listener = http_server.listen(settings["host"], settings["port"])
    except OSError as error:
        where = f"{settings['host']}:{settings['port']} (gateway.host, gateway.port)"
        channel.send({"error": f"it cannot listen on {where}: {error.strerror or error}"})
        sys.exit(1)
    import uvloop

    with listener:
        uvloop.run(_serve(listener, channel, settings))


class OneWrite:
    """A transport that writes what it gets within one turn of the event loop at the turn's end.

    Head and body of an answer by themselves would be two system calls, and wake the client twice.

    Backpressure is the transport's own: it pauses its protocol when it has more than the client reads.
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


async def _serve(listener: socket.socket, channel: Channel, settings: dict[str, Any]) -> None:
    from agentrig.endpoints import Endpoint
    from agentrig.gateway.app import Gateway, form, limit
    from agentrig.gateway.forward import CallRules

    class Connection(http_server.Connection):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """Write what belongs together at once."""
            super().connection_made(OneWrite(transport, self.loop))  # type: ignore[arg-type]

    models = {name: None if given is None else Endpoint(**given) for name, given in settings["models"].items()}
    limits = {"limit": settings["body_mb"] << 20, "sampling": settings["sampling"], "own": settings["own"]}
    gateway = Gateway(settings["token"], CallRules(models=models, **limits))
    port = listener.getsockname()[1]
    config = http_server.settings(
        http_server.Access(gateway, gateway.admit, host=settings["host"], port=port, limit=limit, form=form),
        protocol=Connection,
        log_level="critical",  # a call that was cut has an incomplete answer
        most=http_server.most_connections(),
        date_header=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=3600,  # agents keep their connections over the time of an update
    )
    asyncio.get_running_loop().add_reader(channel.fileno(), lambda: os._exit(0))  # nothing comes any more but its end
    channel.send({"port": port})
    await http_server.Server(config).serve(sockets=[listener])


if __name__ == "__main__":
    main()
