"""vLLM's OpenAI server, in the process that carries out the run's orders or in an additional one."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from vllm.entrypoints.openai.api_server import build_app, init_app_state  # noqa: TID253  (vLLM's process only)

from agentrig import http_server
from agentrig_vllm.chats import Chats
from agentrig_vllm.options import ADAPTER

BODY_LIMIT = 64 << 20
"""Most bytes of a request's body: text of a long context, or images."""

HEALTH = "/health"
"""The path that needs no key. vLLM's own check of keys leaves all paths open that do not begin with /v1."""


class ApiServer:
    """Answers requests with an engine.

    Args:
        key: The bearer token that every request must have.
        state: The application's state, which has vLLM's objects that answer.

    Attributes:
        port: Where it listens.
    """

    def __init__(self, key: str, state: Any) -> None:
        self._key, self._state = key, state
        self._closed, self.port = "", 0
        self._answering: asyncio.Task[None]

    @classmethod
    async def started(cls, engine: Any, arguments: Namespace, order: Mapping[str, Any], number: int) -> ApiServer:
        """Start to answer.

        Args:
            order: The run's first order: the key, and the address.
            number: How many processes listened before this one; a given port is that of the first.
        """
        tasks = await engine.get_supported_tasks()
        app = build_app(arguments, tasks, engine.model_config)
        await init_app_state(engine, app.state, arguments, tasks)
        if order["adapters"]:
            from vllm.lora.request import LoRARequest

            # Requests for the model's name are then answered with the adapters that the worker has from the start.
            name = app.state.openai_serving_models.base_model_paths[0].name
            request = LoRARequest(name, ADAPTER, "the run's adapters are in no file")
            app.state.openai_serving_models.lora_requests[name] = request
        made = cls(order["key"], app.state)
        listener = http_server.listen(order["host"], order["port"] + number if order["port"] else 0)
        made.port = listener.getsockname()[1]
        door = http_server.Access(
            http_server.CallCounter(Chats(app, app.state)),
            made._admit,
            host=order["host"],
            port=made.port,
            limit=BODY_LIMIT,
            form=http_server.openai_error,
        )
        settings = http_server.settings(door, timeout_keep_alive=60, lifespan="on", most=http_server.most_connections())
        server = app.state.server = http_server.Server(settings)  # vLLM's handlers of errors look for it there
        answering = made._answering = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            if answering.done():
                answering.result()
                raise RuntimeError("the HTTP server ended while it started")
            await asyncio.sleep(0.01)
        return made

    def _admit(self, scope: http_server.Scope) -> bool:
        if scope["path"] == HEALTH:
            return False
        if not http_server.same(http_server.bearer(scope), self._key):
            text = "this server answers its own run only: the key is missing or wrong"
            raise http_server.Refused(text, status=401, code="invalid_api_key")
        if self._closed:
            raise http_server.Refused(self._closed, status=503, code="no_weights")
        return True

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
        self._closed = closed
