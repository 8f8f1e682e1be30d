"""The rollouts that may call the gateway: their keys, their calls under way, and the spans of their calls."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from typing import Any

import attrs

from agentrig.endpoints import Endpoint
from agentrig.http_server import Refused

CALLS_AT_ONCE = 32
"""Calls of one rollout that the gateway passes on at once; more of them wait, so that no rollout takes all places."""

CUT, GONE = "cut", "gone"
"""Why a call ended early: its rollout has ended, or its client has broken the connection."""


@attrs.define(eq=False, kw_only=True)
class GatewayCall:
    """A call under way.

    Attributes:
        task: Handles it; cancelled to end the call.
        ended: Why it ended early, `CUT` or `GONE`; '' otherwise.
        recorded: Whether its span is recorded: then its answer is complete, but for what the client has not read yet.
    """

    task: asyncio.Task[Any]
    ended: str = ""
    recorded: bool = False

    def end(self, why: str) -> None:
        """End it; the first reason counts."""
        if not self.ended:
            self.ended = why
            self.task.cancel()


@attrs.define(eq=False, kw_only=True)
class Opened:
    """One attempt of a rollout, from its opening to its close.

    Attributes:
        key: What its calls bring.
        measured: Whether its sampling replaces that of the calls.
        spans: The spans of its calls, as JSON texts in the form of `agentrig.traces.Span`.
        responses: The messages up to the answer of each call of the Responses API, by the response's id.
        calls: Those under way.
        cut: How many calls were cut because the rollout had ended.
        places: Bounds how many of its calls are passed on at once.
    """

    rollout: str
    attempt: int
    key: str = attrs.field(repr=False)
    upstream: Endpoint
    measured: bool = False
    spans: list[bytes] = attrs.field(factory=list, repr=False)
    responses: dict[str, list[dict[str, Any]]] = attrs.field(factory=dict, repr=False)
    calls: set[GatewayCall] = attrs.field(factory=set, repr=False)
    cut: int = 0
    places: asyncio.Semaphore = attrs.field(factory=lambda: asyncio.Semaphore(CALLS_AT_ONCE), repr=False)

    async def end(self) -> None:
        """Cut the calls under way, and wait until their spans are recorded."""
        running = list(self.calls)
        self.cut += sum(not call.recorded for call in running)
        for call in running:
            call.end(CUT)
        await asyncio.gather(*(call.task for call in running), return_exceptions=True)


class Book:
    """All open rollouts.

    A key says by itself that it is one of this gateway's: so the key of a rollout that has ended is told from an
    unknown one, and nothing has to be kept of it.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._open: dict[str, Opened] = {}

    def __len__(self) -> int:
        return len(self._open)

    async def open(self, rollout: str, attempt: int, upstream: Endpoint, *, measured: bool = False) -> Opened:
        """Open an attempt. A former one of this rollout that is still open ends, and its spans are dropped."""
        former = self._open.pop(rollout, None)
        opened = self._open[rollout] = Opened(
            rollout=rollout, attempt=attempt, key=self._new_key(rollout), upstream=upstream, measured=measured
        )
        if former is not None:
            await former.end()
        return opened

    async def close(self, rollout: str, key: str | None = None) -> Opened:
        """Close a rollout's open attempt, if a key is given only that key's; return it with all its spans."""
        opened = self._open.get(rollout) if key is None else self.caller(rollout, key)
        if opened is None:
            raise Refused(f"no attempt of rollout {rollout} is open", status=404, code="not_open")
        del self._open[rollout]
        await opened.end()
        return opened

    def caller(self, rollout: str, key: str) -> Opened:
        """Return the open attempt that a call belongs to."""
        opened = self._open.get(rollout)
        if opened is not None and hmac.compare_digest(opened.key.encode(), key.encode()):
            return opened
        if not self._issued(rollout, key):
            raise Refused(
                "this key is not the one of this rollout: send the rollout's own key with its own base URL; a program "
                "has them as OPENAI_API_KEY and OPENAI_BASE_URL, a function as endpoint.api_key and endpoint.base_url",
                status=401,
                code="invalid_api_key",
            )
        raise Refused(
            "the rollout, or the attempt of it, that this key belongs to has ended: its calls are no longer answered",
            status=410,
            code="rollout_ended",
        )

    def _new_key(self, rollout: str) -> str:
        nonce = secrets.token_hex(16)
        return f"agentrig-{nonce}{self._mark(rollout, nonce)}"

    def _issued(self, rollout: str, key: str) -> bool:
        nonce, mark = key.removeprefix("agentrig-")[:32], key.removeprefix("agentrig-")[32:]
        return hmac.compare_digest(self._mark(rollout, nonce).encode(), mark.encode())

    def _mark(self, rollout: str, nonce: str) -> str:
        return hmac.new(self._secret, f"{rollout}\0{nonce}".encode(), hashlib.sha256).hexdigest()[:32]
