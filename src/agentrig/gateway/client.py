"""What opens and closes rollouts at the gateway: a runner around each attempt, and the run for killed runners."""

from __future__ import annotations

import http.client
import json
import time
import uuid
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, urlsplit

import attrs

from agentrig.endpoints import Endpoint, GatewayAddress
from agentrig.errors import AgentrigError
from agentrig.traces import CUT, Span, Trace

TIMEOUT_S = 60.0
"""Seconds until an answer of the gateway to opening or closing."""


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
class Visit:
    """An attempt of a rollout at the gateway.

    Attributes:
        address: The gateway.
        rollout: The rollout's id.
        key: The attempt's key, once it is opened.
    """

    address: GatewayAddress
    rollout: str
    key: str | None = attrs.field(default=None, init=False, repr=False)

    def open(self, attempt: int, upstream: Endpoint) -> Endpoint:
        """Open the attempt; return the endpoint that the agent gets.

        Raises:
            GatewayError: The gateway does not answer, or refuses.
        """
        sent = {k: v for k, v in attrs.asdict(upstream).items() if k != "gateway"}
        self.key = self._post("/agentrig/open", {"attempt": attempt, "upstream": sent})["key"]
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
        parts = urlsplit(self.address.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=TIMEOUT_S)
        body = json.dumps({"rollout": self.rollout, **sent}).encode()
        headers = {"authorization": f"Bearer {self.address.token}", "content-type": "application/json"}
        try:
            connection.request("POST", path, body, headers)
            reply = connection.getresponse()
            content = reply.read()
        except (OSError, http.client.HTTPException) as error:
            raise GatewayError(
                f"the gateway at {self.address.url} does not answer ({error or type(error).__name__}): has the run "
                "ended, or can this machine not reach that address (gateway.host)?"
            ) from None
        finally:
            connection.close()
        if reply.status != 200:
            raise GatewayError(f"the gateway at {self.address.url} answers {reply.status}: {content.decode()[:500]}")
        return json.loads(content)
