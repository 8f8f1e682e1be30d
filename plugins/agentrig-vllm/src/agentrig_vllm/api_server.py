"""vLLM's OpenAI server, in the process that carries out the run's orders or in an additional one."""

from __future__ import annotations

import asyncio
import socket
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from vllm.entrypoints.openai.api_server import build_app, init_app_state  # noqa: TID253  (vLLM's process only)

from agentrig import http_server
from agentrig_vllm.access import AccessControl
from agentrig_vllm.chats import Chats


class ApiServer:
    """Answers requests with an engine.

    Args:
        access: Its access control.
        state: The application's state, which has vLLM's objects that answer.
        port: The port on which it listens.
        answering: The task that answers requests; done when the server has ended.
    """

    def __init__(self, access: AccessControl, state: Any, port: int, answering: asyncio.Task[None]) -> None:
        self._access, self._state = access, state
        self.port, self._answering = port, answering

    @classmethod
    async def started(cls, engine: Any, arguments: Namespace, order: Mapping[str, Any], number: int) -> ApiServer:
        """Start to answer.

        Args:
            engine: vLLM's client of the engine.
            arguments: vLLM's command line.
            order: The run's first order: the key, and the address.
            number: How many processes listened before this one; a given port is that of the first.
        """
        tasks = await engine.get_supported_tasks()
        app = build_app(arguments, tasks, engine.model_config)
        await init_app_state(engine, app.state, arguments, tasks)
        access = AccessControl(Chats(app, app.state), order["key"])
        port = order["port"] + number if order["port"] else 0
        listening = socket.create_server((order["host"], port), backlog=2048)
        settings = http_server.settings(
            access, timeout_keep_alive=60, lifespan="on", most=http_server.most_connections()
        )
        server = app.state.server = http_server.Server(settings)  # vLLM's handlers of errors look for it there
        answering = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started:
            if answering.done():
                answering.result()
                raise RuntimeError("the HTTP server ended while it started")
            await asyncio.sleep(0.01)
        return cls(access, app.state, listening.getsockname()[1], answering)

    @property
    def ended(self) -> bool:
        """Whether the server has ended."""
        return self._answering.done()

    async def tell(self, closed: str, version: int | None) -> None:
        """Refuse requests, or answer them with a version's name.

        Args:
            closed: Why no request is answered from now on; '' to answer them.
            version: The version of the weights; None where they did not change.
        """
        if version is not None:
            for each in (self._state.openai_serving_chat, self._state.openai_serving_completion):
                each.system_fingerprint = f"v{version}"
        self._access.closed = closed
