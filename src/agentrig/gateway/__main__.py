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


async def _serve(listener: socket.socket, channel: Channel, settings: dict[str, Any]) -> None:
    from agentrig.endpoints import Endpoint
    from agentrig.gateway.app import Gateway, form, limit
    from agentrig.gateway.forward import CallRules

    models = {name: None if given is None else Endpoint(**given) for name, given in settings["models"].items()}
    limits = {"limit": settings["body_mb"] << 20, "sampling": settings["sampling"], "own": settings["own"]}
    gateway = Gateway(settings["token"], CallRules(models=models, **limits))
    port = listener.getsockname()[1]
    config = http_server.settings(
        http_server.Access(gateway, gateway.admit, host=settings["host"], port=port, limit=limit, form=form),
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
