"""What opens and closes rollouts at the gateway: a runner around each attempt, and the run for killed runners."""

from __future__ import annotations

import http.client
import json
import os
import select
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, urlsplit

import attrs

from agentrig.endpoints import Endpoint, GatewayAddress
from agentrig.errors import AgentrigError
from agentrig.text import parsed
from agentrig.traces import CUT, Span, Trace

TIMEOUT_S = 60.0
"""Seconds until an answer of the gateway to opening or closing."""

IDLE_S = 30.0
"""Seconds that an idle connection is used again: a firewall between machines may forget it without a word."""


class GatewayError(AgentrigError):
    """The gateway does not answer, or refuses; the message says which."""


@attrs.frozen(kw_only=True)
class Calls:
    """What the gateway recorded of an attempt: its calls' spans, and how many calls it cut at the end."""

    spans: Sequence[Span]
    cut: int

    def trace(self, rollout: str) -> Trace:
        """Return the trace of a rollout of which nothing else is left."""
        times = [t for s in self.spans for t in (s.start, s.end)] or [time.time()]
        more = {CUT: self.cut} if self.cut else {}
        root = Span(
            id=uuid.uuid4().hex[:16], parent=None, name="rollout", start=min(times), end=max(times), attributes=more
        )
        known = {s.id for s in self.spans}
        spans = [s if s.parent in known else attrs.evolve(s, parent=root.id) for s in self.spans]
        return Trace(rollout_id=rollout, spans=(root, *sorted(spans, key=lambda s: s.start)))


@attrs.define(eq=False)
class GatewayAttempt:
    """An attempt of a rollout at the gateway; it has its `key` once it is opened."""

    address: GatewayAddress
    rollout: str
    key: str | None = attrs.field(default=None, init=False, repr=False)

    def open(self, attempt: int, upstream: Endpoint, *, measured: bool = False) -> Endpoint:
        """Open the attempt; return the endpoint that the agent gets.

        With `measured`, the upstream's sampling replaces what the agent sends; else it only fills in.

        Raises:
            GatewayError: The gateway does not answer, or refuses.
        """
        sent = {k: v for k, v in attrs.asdict(upstream).items() if k != "gateway"}
        self.key = self._post("/agentrig/open", {"attempt": attempt, "upstream": sent, "measured": measured})["key"]
        return Endpoint(
            base_url=f"{self.address.url}/rollouts/{quote(self.rollout, safe='')}/v1",
            model=upstream.model,
            api_key=str(self.key),
            sampling=upstream.sampling,
            token_ids=upstream.token_ids,
        )

    def close(self) -> Calls:
        """Close the attempt, or without a key any that is open; return what was recorded.

        Raises:
            GatewayError: The gateway does not answer, or nothing is open.
        """
        found = self._post("/agentrig/close", {"key": self.key} if self.key else {})
        return Calls(spans=[Span(**span) for span in found["spans"]], cut=found["cut"])

    def _post(self, path: str, sent: dict[str, Any]) -> Any:
        body = json.dumps({"rollout": self.rollout, **sent}).encode()
        try:
            status, content = _kept.post(self.address, path, body)
        except (OSError, http.client.HTTPException) as error:
            raise GatewayError(
                f"the gateway at {self.address.url} does not answer ({error or type(error).__name__}): has the run "
                "ended, or can this machine not reach that address (gateway.host)?"
            ) from None
        if status != 200:
            raise GatewayError(f"the gateway at {self.address.url} answers {status}: {content.decode()[:500]}")
        return parsed(content)[0]


class _Connection(http.client.HTTPConnection):
    """A connection that closes when its thread has ended."""

    used = 0.0

    def __del__(self) -> None:
        self.close()

    @property
    def fit(self) -> bool:
        """Whether it can be used again: if the other end has closed it, there is something to read."""
        if self.sock is None or time.monotonic() - self.used > IDLE_S:
            return False
        reading = select.poll()
        reading.register(self.sock, select.POLLIN)
        return not reading.poll(0)


class _Kept(threading.local):
    """A thread's connection to the gateway: kept, because to connect costs more than to open or close a rollout."""

    connection: _Connection | None = None
    owner = 0, ""  # of a process, to a gateway: a forked process makes one of its own

    def post(self, address: GatewayAddress, path: str, body: bytes) -> tuple[int, bytes]:
        """Send a request; return the status and the body of its answer.

        Raises:
            OSError, http.client.HTTPException: The gateway does not answer.
        """
        owner = os.getpid(), address.url
        connection = self.connection
        if connection is None or self.owner != owner or not connection.fit:
            parts = urlsplit(address.url)
            connection = _Connection(parts.hostname or "", parts.port or 80, timeout=TIMEOUT_S)
            self.connection, self.owner = connection, owner  # the former one closes
        headers = {"authorization": f"Bearer {address.token}", "content-type": "application/json"}
        try:
            connection.request("POST", path, body, headers)
            reply = connection.getresponse()
            content = reply.read()
        except BaseException:
            connection.close()
            raise
        connection.used = time.monotonic()
        return reply.status, content


_kept = _Kept()
