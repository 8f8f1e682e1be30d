"""The agent `http`: posts a rollout to the user's service, and takes the answer from its reply or from a callback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Mapping
from typing import Any

import httpx

from agentrig.agents import Judged, Outcome
from agentrig.endpoints import Endpoint, without_proxy
from agentrig.errors import AgentFailure
from agentrig.external.callbacks import Callback, Listener, read_answer, returned
from agentrig.external.config import HttpConfig, key_headers
from agentrig.pools import Job
from agentrig.text import cut
from agentrig.traces import ADDRESS
from agentrig.tracing.recorder import current

log = logging.getLogger(__name__)

BACKOFF_S = 0.2
"""Seconds before the second try; each further one waits twice as long, or as long as the service's Retry-After says."""

LONGEST_BACKOFF_S = 2.0
"""Longest wait between two tries to reach a service that is down, seconds."""

BUSY = (429, 503)
"""Statuses of a service that has refused a request for the moment: it has not begun."""

BETWEEN = (502, 504)
"""Statuses of a proxy that has lost a request: the service may have it."""

NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
"""Errors before the service can have got anything."""

SHOWN = 500
"""Characters of a reply that a message shows."""


class HttpAgent:
    """Posts each rollout to a service; all rollouts of a runner share one event loop.

    Attributes:
        config: Its keys.
        tls: For https.
    """

    def __init__(self, config: HttpConfig) -> None:
        self.config, self.tls = config, httpx.create_ssl_context()
        without_proxy(config.url)
        self._down_since: float | None = None

    def __call__(self, task_input: Mapping[str, Any], endpoint: Endpoint) -> Awaitable[Judged]:
        """Run a task outside of a run, as a rollout of its own."""
        return self.run_job(Job(id=uuid.uuid4().hex, input=task_input, endpoint=endpoint))

    async def run_job(self, job: Job) -> Judged:
        """Run a rollout; see `Exchange` for the kinds of its failures."""
        config, callback = self.config, None
        if (recorder := current()) is not None:
            recorder.about[ADDRESS] = "base_url and api_key of the request that it gets"
        if config.callback:
            listener = Listener.shared(config.callback_host, config.callback_name)
            callback = Callback(job.id, attempt=job.attempt, listener=listener)
        with callback or contextlib.nullcontext():
            try:
                async with asyncio.timeout(config.timeout_s) as limit:
                    exchange = Exchange(self, job, callback, limit)
                    answer = await self._first(exchange, callback)
            except TimeoutError:
                said = f"; what it posted was refused: {callback.refused}" if callback and callback.refused else ""
                raise exchange.failure(
                    "service-timeout", f"did not answer within {config.timeout_s:g} s ({exchange.state}){said}"
                ) from None
        return returned(answer)

    def reached(self, down: str = "") -> None:
        """Note that the service has been reached, or why not: one line when it begins to be down, and one at the end.

        All rollouts of a runner share this.
        """
        url, since = self.config.url, self._down_since
        if down and since is None:
            self._down_since = time.monotonic()
            wait = f"its rollouts wait for it, at most {self.config.restart_s:g} s (agent.restart_s)"
            log.warning("the service %s %s; %s", url, down, wait)
        elif not down and since is not None:
            self._down_since = None
            log.warning("the service %s is back after %.0f s", url, time.monotonic() - since)

    async def _first(self, exchange: Exchange, callback: Callback | None) -> Outcome:
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
        "input": job.given,
        "base_url": endpoint.base_url,
        "api_key": endpoint.api_key,
        "model": endpoint.model,
        "sampling": dict(endpoint.sampling),
        "headers": dict(endpoint.headers),
        "timeout_s": timeout_s,
        "callback": None if callback is None else {"url": callback.url, "key": callback.key},
    }


class Exchange:
    """Sends one rollout's request until the service takes it.

    What goes wrong is an `AgentFailure` with one of these kinds:

    - `service-down`: it can't be reached within `restart_s`, or its connection breaks at the last try too;
    - `service-error`: it answers with a status from 400 on;
    - `service-redirect`: it answers with another address, which would get the rollout's key;
    - `service-timeout`: it does not answer in time;
    - `reply-too-long`: its reply has more than `reply_mb`;
    - `bad-reply`: its reply is no answer.

    Args:
        limit: The rollout's time limit; it is put off while the service is down.

    Attributes:
        state: What it waits for, as text.
    """

    def __init__(self, agent: HttpAgent, job: Job, callback: Callback | None, limit: asyncio.Timeout) -> None:
        self._agent, self._config, self._limit = agent, agent.config, limit
        self._body = json.dumps(request_of(job, callback, timeout_s=self._config.timeout_s)).encode()
        keys = [job.endpoint.api_key, *([callback.key] if callback else [])]
        self._hidden = [word for word in keys if len(word) >= 6]
        # The idempotency key is the same for all tries of an attempt, and for no other attempt.
        own = {"accept-encoding": "identity", "idempotency-key": f"{job.id}/{job.attempt}"}
        self._headers = {"content-type": "application/json", **own, **key_headers(self._config)}
        self.state = "not connected yet"

    async def run(self) -> Outcome | None:
        """Return the answer of the reply, or None if the service will call back (status 202)."""
        connect = httpx.Timeout(None, connect=self._config.connect_s)
        async with httpx.AsyncClient(verify=self._agent.tls, timeout=connect, headers=self._headers) as client:
            tries = unreached = 0
            since = 0.0
            while True:
                try:
                    return await self._once(client)
                except _Unreachable as error:
                    start = time.monotonic()
                    since, unreached = since or start, unreached + 1
                    self.state = f"the service {error}"
                    self._agent.reached(down=str(error))
                    if start - since >= self._config.restart_s:
                        raise self.failure(
                            "service-down", f"{error}, for {self._config.restart_s:g} s (agent.restart_s)"
                        ) from error
                    left = since + self._config.restart_s - start
                    pause_s = min(left, LONGEST_BACKOFF_S, BACKOFF_S * 2 ** min(unreached, 9))
                    if (end := self._limit.when()) is not None:  # the rollout's time does not run meanwhile
                        self._limit.reschedule(end + pause_s)
                    await asyncio.sleep(pause_s)
                except _Lost as lost:
                    tries, unreached, since = tries + 1, 0, 0.0
                    twice = not lost.never_began and not self._config.idempotent
                    if twice or tries > self._config.retries:
                        why = "; it is not sent again, because agent.idempotent is false" if twice else ""
                        raise self.failure(lost.kind, f"{lost}, {_times(tries)}{why}") from lost
                    self.state = f"it waits to be sent again: the service {lost}"
                    await asyncio.sleep(max(lost.wait_s, BACKOFF_S * 2 ** (tries - 1)))

    async def _once(self, client: httpx.AsyncClient) -> Outcome | None:
        self.state = "the request is sent, and no reply has come"
        try:
            async with client.stream("POST", self._config.url, content=self._body) as reply:
                self._agent.reached()
                self.state = "its reply has begun and has not ended"
                return await self._read(reply)
        except NEVER_SENT as error:
            raise _Unreachable(f"cannot be reached: {_said(error)}") from error
        except httpx.DecodingError as error:
            raise self.failure("bad-reply", f"sends a reply that cannot be decoded: {_said(error)}") from error
        except httpx.TransportError as error:
            raise _Lost(f"broke the connection: {_said(error)}") from error

    async def _read(self, reply: httpx.Response) -> Outcome | None:
        status = reply.status_code
        if status >= 400 or status in (301, 302, 303, 307, 308):
            self._refuse(reply, await self._text(reply, SHOWN * 4))
        limit = self._config.reply_mb << 20
        text = await self._text(reply, limit)
        if len(text) > limit:
            raise self.failure("reply-too-long", f"sends more than {self._config.reply_mb} MiB (agent.reply_mb)")
        if status == 202:
            self.state = "it has answered 202, and has not called back"
            return None
        try:
            return read_answer(json.loads(text))
        except (ValueError, RecursionError) as error:
            shown = cut(text.decode("utf-8", "replace"), SHOWN)
            raise self.failure("bad-reply", f"answers {status} with {shown!r}: {error}") from None

    def _refuse(self, reply: httpx.Response, text: bytes) -> None:
        """Raise what a status means that is no answer."""
        status, location = reply.status_code, reply.headers.get("location", "nowhere")
        shown = cut(text.decode("utf-8", "replace"), SHOWN)
        if status < 400:
            raise self.failure(
                "service-redirect",
                f"answers {status}: it moved to {location}. Name that address (agent.url): a rollout's keys go to no "
                "other address than the one that you gave",
            )
        if status in BUSY or status in BETWEEN:
            wait = reply.headers.get("retry-after", "")
            raise _Lost(
                f"answers {status} {shown!r}",
                kind="service-error",
                never_began=status in BUSY,
                wait_s=float(wait) if wait.isdecimal() else 0.0,
            )
        cure = ": check the key of the service (agent.api_key)" if status in (401, 403) else ""
        raise self.failure("service-error", f"answers {status} {shown!r}{cure}")

    async def _text(self, reply: httpx.Response, limit: int) -> bytes:
        """Return the reply's body; of a longer one somewhat more than the limit."""
        text = bytearray()
        async for chunk in reply.aiter_bytes():
            text += chunk
            if len(text) > limit:
                break
        return bytes(text)

    def failure(self, kind: str, what: str) -> AgentFailure:
        """Return the failure of this rollout; its message shows no key of the rollout."""
        for word in self._hidden:
            what = what.replace(word, "<the rollout's key>")
        return AgentFailure(f"the service {self._config.url} {what}", kind=kind)


class _Unreachable(Exception):
    """The service cannot be reached: it has got nothing. The text continues `the service`."""


class _Lost(Exception):
    """A try that may succeed later; the text continues `the service`."""

    def __init__(
        self, what: str, *, kind: str = "service-down", never_began: bool = False, wait_s: float = 0.0
    ) -> None:
        super().__init__(what)
        self.kind, self.never_began, self.wait_s = kind, never_began, wait_s


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__


def _times(tries: int) -> str:
    return "at the only try" if tries == 1 else f"{tries} times"
