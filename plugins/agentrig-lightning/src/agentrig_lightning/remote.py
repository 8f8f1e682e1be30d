"""A runner on another machine: takes rollouts from a run's store, runs them in a pool, and reports the results."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import attrs
import httpx

from agentrig import __version__
from agentrig.endpoints import is_loopback, without_proxy
from agentrig.errors import AgentrigError, ConfigError
from agentrig.pools import Job, Result
from agentrig.processes.ends import Interrupted, name_of
from agentrig.runners.processes import Pool
from agentrig.text import mask
from agentrig_lightning.joining import ALIVE, ENDED, JOIN, LEAVE, REPORT, TOKEN_VARIABLE

log = logging.getLogger(__name__)

POLL_S = 0.2
"""Seconds between two questions for work while there is room."""

BEAT_S = 1.0
"""Seconds between two signs of life."""

DEAD_S = 6.0
"""Seconds without an answer after which the store counts as dead."""

GRACE_S = 10.0
"""Seconds that running rollouts get to finish when the runner is asked to leave."""


@attrs.frozen
class StoreAddress:
    """A run's store: its URL without the token, and the token."""

    url: str
    token: str = attrs.field(repr=False)

    @classmethod
    def read(cls, text: str, token: str | None) -> StoreAddress:
        """Read a URL, with the token as its password, as `?token=` (the dashboard's link has it there) or beside it."""
        parts = urlsplit(text.rstrip("/"))
        if parts.scheme not in ("http", "https") or not parts.hostname:
            shown = text.rpartition("@")[2].partition("?")[0]
            raise ConfigError(f"--store {shown} is no address: write http://HOST:PORT")
        (linked,) = parse_qs(parts.query).get("token", [""])[:1]
        token = parts.password or linked or token or os.environ.get(TOKEN_VARIABLE, "").strip()
        if not token:
            raise ConfigError(
                f"no token for the store at {parts.hostname}: set {TOKEN_VARIABLE}, or give --token-file FILE; the run "
                "printed it when it started"
            )
        if not token.isascii() or not token.isprintable() or " " in token:  # it goes into a header
            raise ConfigError("the store's token has several lines, or characters that no token has: give one line")
        mask(token, f"{token[:3]}…")
        return cls(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}", token)

    @property
    def with_token(self) -> str:
        """The URL with the token as its password, as Agent Lightning's client takes it."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://agentrig:{quote(self.token, safe='')}@{parts.netloc}"


class StoreConnection:
    """The routes of a run's store that are agentrig's own."""

    def __init__(self, address: StoreAddress, worker: str) -> None:
        self._address, self._worker = address, worker
        without_proxy(address.url)
        headers = {"authorization": f"Bearer {address.token}", "content-type": "application/json"}
        self._client = httpx.AsyncClient(base_url=address.url, headers=headers, timeout=httpx.Timeout(60, connect=3))

    async def post(self, path: str, *, timeout_s: float = 60.0, **sent: Any) -> Any:
        """Send this runner's id and more; return what the store answers.

        Raises:
            AgentrigError: The store refuses, for example because of the token.
            httpx.TransportError: It does not answer.
        """
        body = json.dumps({"worker": self._worker, **sent})
        reply = await self._client.post(path, content=body, timeout=timeout_s)
        if reply.status_code == 401:
            raise AgentrigError(f"the store at {self._address.url} refuses the token: use the one that the run printed")
        if reply.status_code in (404, 405):
            raise AgentrigError(f"there is no store of an agentrig run at {self._address.url}: it has no {path}")
        if reply.status_code >= 400:
            raise AgentrigError(f"the store at {self._address.url} answers {reply.status_code}: {reply.text[:300]}")
        return reply.json()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


async def join(address: StoreAddress, worker: str) -> Mapping[str, Any]:
    """Return what the run tells a runner that joins."""
    connection = StoreConnection(address, worker)
    try:
        offer: Mapping[str, Any] = await connection.post(JOIN, timeout_s=DEAD_S, version=__version__)
    except httpx.TransportError as error:
        raise dead(address, error) from None
    finally:
        await connection.close()
    if offer["version"] != __version__:
        log.warning("the run has agentrig %s, this runner %s: use the same version", offer["version"], __version__)
    return offer


def dead(address: StoreAddress, error: object) -> AgentrigError:
    """Return the error for a store that does not answer."""
    secure = address.url.startswith("https:")
    cure = f"A run's store has no TLS: write http{address.url[5:]}" if secure else "Is the run still going?"
    return AgentrigError(f"the store at {address.url} does not answer: {error or 'timeout'}. {cure}")


def worker_id() -> str:
    """Return an id that no other runner has."""
    return f"agentrig-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"


class RemoteRunner:
    """Runs rollouts of a run's store in a pool of this machine, which it starts and closes.

    Attributes:
        done: How many results the run has taken.
    """

    def __init__(self, address: StoreAddress, pool: Pool, worker: str) -> None:
        self._address, self._pool, self._worker = address, pool, worker
        self._attempts: dict[str, str] = {}
        self._resources: dict[str, Any] = {}
        self._reports: set[asyncio.Task[None]] = set()
        self._leaving: int | None = None
        self._left_at = 0.0
        self._ended = False
        self.done = 0

    def leave(self, number: int, frame: Any) -> None:
        """Take no more rollouts; a second signal gives the running ones back at once. A signal handler."""
        again, self._leaving = self._leaving is not None, number
        self._left_at = 0.0 if again else time.monotonic()
        log.warning(
            "%s: leaving the run%s", name_of(number), "" if again else f"; {len(self._attempts)} rollouts end first"
        )
        self._pool.wake()

    def run(self) -> None:
        """Run rollouts until the run has ended.

        Raises:
            AgentrigError: The store is dead, the agent cannot be built, or the model cannot be reached from here.
            Interrupted: A signal asked this runner to leave; what it had not finished was given back.
        """
        try:
            self._pool.start()
            asyncio.run(self._run())
        finally:
            self._pool.close()

    async def _run(self) -> None:
        from agentlightning import LightningStoreClient

        store = LightningStoreClient(
            self._address.with_token, retry_delays=(0.5, 1.0), health_retry_delays=(), connection_timeout=3.0
        )
        connection = StoreConnection(self._address, self._worker)
        beat = asyncio.create_task(self._beat(connection))
        try:
            while not self._ended:
                if beat.done():
                    beat.result()  # it raises: the store is dead
                if self._leaving is not None and (not self._attempts or time.monotonic() - self._left_at > GRACE_S):
                    break
                await self._turn(store, connection)
        finally:
            beat.cancel()
            with contextlib.suppress(asyncio.CancelledError, AgentrigError):
                await beat
            with contextlib.suppress(httpx.TransportError, AgentrigError):  # the run may have ended, or died
                await connection.post(LEAVE, timeout_s=3.0)
            await connection.close()
            await store.close()
        if self._leaving is not None and not self._ended:
            raise Interrupted(
                self._leaving, f"left the run after {self.done} rollouts; {len(self._attempts)} start again elsewhere"
            )

    async def _beat(self, connection: StoreConnection) -> None:
        """Give signs of life, and learn when the run ends."""
        heard = time.monotonic()
        while True:
            try:
                reply = await connection.post(ALIVE, timeout_s=3.0)
                heard = time.monotonic()
                if reply["state"] == ENDED:
                    self._ended = True
                    self._pool.wake()
                    return
            except httpx.TransportError as error:
                if time.monotonic() - heard > DEAD_S:
                    raise dead(self._address, error) from None
            await asyncio.sleep(BEAT_S)

    async def _turn(self, store: Any, connection: StoreConnection) -> None:
        from agentrig_lightning.resources import job_of

        room = self._pool.room if self._pool.built.is_set() and self._leaving is None else 0
        if room > 0:
            try:
                taken = await store.dequeue_many_rollouts(limit=room, worker_id=self._worker)
                for attempted in taken:
                    resources = await self._resources_of(store, attempted.resources_id)
                    runs = attempted.rollout_id in self._attempts  # given back as lost, and taken again
                    self._attempts[attempted.rollout_id] = attempted.attempt.attempt_id
                    if not runs:
                        self._pool.submit(self._reachable(job_of(attempted, resources)))
            except (OSError, TimeoutError) as error:  # aiohttp's are; the heart beat decides when the store is dead
                log.debug("the store did not answer: %s", error)
        for result in await asyncio.to_thread(self._pool.poll, POLL_S):
            report = asyncio.create_task(self._report(connection, result))
            self._reports.add(report)
            report.add_done_callback(self._reports.discard)
        for report in [r for r in self._reports if r.done()]:
            report.result()

    async def _resources_of(self, store: Any, resources_id: str | None) -> Any:
        if not resources_id:
            return await store.get_latest_resources()
        if resources_id not in self._resources:
            self._resources[resources_id] = await store.get_resources_by_id(resources_id)
        return self._resources[resources_id]

    def _reachable(self, job: Job) -> Job:
        if is_loopback(job.endpoint.reached_at) and not is_loopback(self._address.url):
            what, key = job.endpoint.way
            raise AgentrigError(
                f"the run says that its {what} is at {job.endpoint.reached_at}, which is this machine and not the "
                f"run's: let it listen on the run's address ({key}=0.0.0.0), or forward its port and the store's to "
                "this machine (ssh -L), and join at http://127.0.0.1:PORT"
            )
        return job

    async def _report(self, connection: StoreConnection, result: Result) -> None:
        """Send a result until the store has it; the heart beat ends this if the store is dead."""
        while True:
            try:
                reply = await connection.post(
                    REPORT, rollout_id=result.id, attempt_id=self._attempts[result.id], result=result.packed().decode()
                )
                break
            except httpx.TransportError as error:
                log.debug("the store did not answer: %s", error)
                await asyncio.sleep(BEAT_S)
        self._attempts.pop(result.id, None)
        if reply["counts"]:
            self.done += 1
        else:
            log.warning("the run no longer waits for rollout %s: another runner has taken it over", result.id)
