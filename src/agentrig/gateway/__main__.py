"""The gateway's process: `python -m agentrig.gateway DESCRIPTOR`, started by `agentrig.gateway.process.Gateway`.

It gets its settings over the descriptor, answers with its port or an error, and ends when the other end is closed: with
the run, however that ends. It logs nothing about calls: they have keys.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from typing import Any

from agentrig.processes.ends import SIGNALS

log = logging.getLogger(__name__)


def main() -> None:
    """Run the gateway's process."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # A terminal and Slurm send these to all processes of a run, whose current step still needs its gateway.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    line = socket.socket(fileno=int(sys.argv[1]))
    line.set_inheritable(False)
    with line.makefile("rb") as lines:
        settings = json.loads(lines.readline())
    try:
        family = socket.AF_INET6 if ":" in settings["host"] else socket.AF_INET
        listener = socket.create_server((settings["host"], settings["port"]), family=family, backlog=1024)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a stream's events must not wait for each other
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    except OSError as error:
        line.sendall(json.dumps({"error": error.strerror or str(error)}).encode() + b"\n")
        sys.exit(1)
    import uvloop

    with listener:
        uvloop.run(_serve(listener, line, settings))


async def _serve(listener: socket.socket, line: socket.socket, settings: dict[str, Any]) -> None:
    from agentrig import http_server
    from agentrig.endpoints import Endpoint
    from agentrig.gateway.app import Gateway
    from agentrig.gateway.writing import OneWrite

    class Connection(http_server.Connection):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """Write what belongs together at once."""
            super().connection_made(OneWrite(transport, self.loop))  # type: ignore[arg-type]

    models = {name: None if given is None else Endpoint(**given) for name, given in settings["models"].items()}
    limit = settings["body_mb"] << 20
    config = http_server.settings(
        Gateway(limit=limit, models=models, **{name: settings[name] for name in ("token", "sampling", "own")}),
        protocol=Connection,
        log_level="critical",  # a call that was cut has an incomplete answer
        most=http_server.most_connections(),
        date_header=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=3600,  # agents keep their connections over the time of an update
    )
    asyncio.get_running_loop().add_reader(line, lambda: os._exit(0))  # nothing comes any more but its end
    line.sendall(json.dumps({"port": listener.getsockname()[1]}).encode() + b"\n")
    await http_server.Server(config).serve(sockets=[listener])


if __name__ == "__main__":
    main()
