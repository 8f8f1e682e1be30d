"""The agent `http`: posts a rollout to the user's service, and takes the answer from its reply or from a callback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import Awaitable, Mapping
from typing import Any

import httpx

from agentrig.agents import Judged
from agentrig.callbacks import Answer, Callback, Listener
from agentrig.endpoints import Endpoint, without_proxy
from agentrig.errors import AgentFailure
from agentrig.pools import Job
from agentrig.services.config import HttpConfig
from agentrig.services.exchange import Exchange, Outage


class HttpAgent:
    """Posts each rollout to a service; all rollouts of a runner share one event loop.

    Args:
        config: Its keys.
    """

    def __init__(self, config: HttpConfig) -> None:
        self._config = config
        without_proxy(config.url)
        self._tls = httpx.create_ssl_context()
        self._outage = Outage(config.url, config.restart_s)

    def __call__(self, task_input: Mapping[str, Any], endpoint: Endpoint) -> Awaitable[Judged]:
        """Run a task outside of a run, as a rollout of its own."""
        return self.run_job(Job(id=uuid.uuid4().hex, input=task_input, endpoint=endpoint))

    async def run_job(self, job: Job) -> Judged:
        """Run a rollout.

        Raises:
            AgentFailure: The service does not answer, or answers with a failure; see `Exchange` for the kinds.
        """
        config = self._config
        callback = self._callback(job) if config.callback else None
        with callback or contextlib.nullcontext():
            body = json.dumps(request_of(job, callback, timeout_s=config.timeout_s)).encode()
            hidden = [job.endpoint.api_key, *([callback.key] if callback else [])]
            key = f"{job.id}/{job.attempt}"
            try:
                async with asyncio.timeout(config.timeout_s) as limit:
                    exchange = Exchange(config, self._tls, body, self._outage, limit, key=key, hidden=hidden)
                    answer = await self._first(exchange, callback)
            except TimeoutError:
                said = f"; what it posted is no answer: {callback.refused}" if callback and callback.refused else ""
                raise exchange.failure(
                    "service-timeout", f"did not answer within {config.timeout_s:g} s ({exchange.state}){said}"
                ) from None
        return answer.judged()

    def _callback(self, job: Job) -> Callback:
        listener = Listener.shared(self._config.callback_host, self._config.callback_name)
        return Callback(job.id, attempt=job.attempt, listener=listener)

    async def _first(self, exchange: Exchange, callback: Callback | None) -> Answer:
        """Return the answer that comes first, by the reply or by the callback; the other one does not count."""
        if callback is None:
            answer = await exchange.run()
            if answer is None:
                raise exchange.failure("bad-reply", "answers 202, but callbacks are off (agent.callback)")
            return answer
        replied = asyncio.create_task(exchange.run())
        called = asyncio.create_task(callback.answer())
        try:
            await asyncio.wait((replied, called), return_when=asyncio.FIRST_COMPLETED)
            if not called.done():
                try:
                    answer = replied.result()
                except AgentFailure:
                    if callback.arrived is None:
                        raise
                    answer = None
                if answer is not None:
                    return answer
            return await called
        finally:
            for task in (replied, called):
                task.cancel()
            await asyncio.gather(replied, called, return_exceptions=True)


def request_of(job: Job, callback: Callback | None, *, timeout_s: float) -> dict[str, Any]:
    """Return what the service gets of a rollout, as JSON values."""
    endpoint = job.endpoint
    return {
        "rollout_id": job.id,
        "attempt": job.attempt,
        "mode": job.mode,
        "input": job.input,
        "base_url": endpoint.base_url,
        "api_key": endpoint.api_key,
        "model": endpoint.model,
        "sampling": dict(endpoint.sampling),
        "headers": dict(endpoint.headers),
        "timeout_s": timeout_s,
        "callback": None if callback is None else {"url": callback.url, "key": callback.key},
    }
