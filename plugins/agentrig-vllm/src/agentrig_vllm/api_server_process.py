"""More processes that answer HTTP requests with the same engine.

Templates, text of tokens and log-probabilities take more time than a small model's forward passes, and one Python
process makes them for one request after another. Each additional process is forked from the one that has imported
vLLM.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from argparse import Namespace
from collections.abc import Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection, Pipe
from typing import Any

from agentrig.hardware import usable_cores
from agentrig.processes.supervisor import end_with_parent

CORES_EACH = 6
"""Cores of the machine for each process, where the settings name no number: agents and the run need the others."""

MOST = 4

WATCH_S = 0.2
"""Seconds between two checks that a process still answers."""


def processes(wanted: int) -> int:
    """Return how many processes answer: the number wanted, or for 0 as many as are of use on this machine."""
    return wanted or max(1, min(MOST, usable_cores() // CORES_EACH))


class ApiServerProcess:
    """An additional process that answers HTTP requests; it ends when the process that forked it ends.

    Args:
        number: The number of this process among all that answer, from 1.
        addresses: The arguments that tell vLLM's client where the engine is.
        order: The run's first order: the key, and the address.
    """

    def __init__(
        self, number: int, config: Any, arguments: Namespace, addresses: Mapping[str, Any], order: Mapping[str, Any]
    ) -> None:
        self._channel, theirs = Pipe()
        given = (number, config, arguments, dict(addresses), dict(order), theirs)
        self._process = get_context("fork").Process(target=_run, args=given, daemon=True)
        self._process.start()
        theirs.close()

    @property
    def alive(self) -> bool:
        """Whether the process is alive."""
        return self._process.is_alive()

    async def port(self) -> int:
        """Wait until the process answers requests; return its port.

        Raises:
            RuntimeError: The process ended first; the log has the cause.
        """
        return int(await self._heard())

    async def tell(self, closed: str, version: int | None) -> None:
        """Call `ApiServer.tell` in the process, and wait until it is done."""
        self._channel.send((closed, version))
        await self._heard()

    async def _heard(self) -> Any:
        try:
            return await asyncio.to_thread(self._channel.recv)
        except (EOFError, OSError):
            raise RuntimeError("a process that answers HTTP requests has ended") from None


def client(config: Any, arguments: Namespace, addresses: Mapping[str, Any]) -> Any:
    """Return vLLM's client of the engine; waits until the engine has loaded."""
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    quiet = arguments.disable_log_stats
    usage = UsageContext.OPENAI_API_SERVER
    return AsyncLLM.from_vllm_config(config, usage_context=usage, disable_log_stats=quiet, **addresses)


def _run(
    number: int,
    config: Any,
    arguments: Namespace,
    addresses: Mapping[str, Any],
    order: Mapping[str, Any],
    channel: Connection[Any, Any],
) -> None:
    """Answer requests until the other process ends."""
    end_with_parent(os.getppid())
    import uvloop

    try:
        uvloop.run(_serve(number, config, arguments, addresses, order, channel))
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


async def _serve(
    number: int,
    config: Any,
    arguments: Namespace,
    addresses: Mapping[str, Any],
    order: Mapping[str, Any],
    channel: Connection[Any, Any],
) -> None:
    from agentrig_vllm.api_server import ApiServer

    engine = client(config, arguments, addresses)
    server = await ApiServer.started(engine, arguments, order, number)
    channel.send(server.port)
    told: asyncio.Queue[tuple[str, int | None] | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def listen() -> None:
        try:
            while True:
                loop.call_soon_threadsafe(told.put_nowait, channel.recv())
        except (EOFError, OSError):
            loop.call_soon_threadsafe(told.put_nowait, None)

    threading.Thread(target=listen, daemon=True).start()
    while not server.ended:
        try:
            news = await asyncio.wait_for(told.get(), WATCH_S)
        except TimeoutError:
            continue
        if news is None:
            return
        await server.tell(*news)
        channel.send("")
