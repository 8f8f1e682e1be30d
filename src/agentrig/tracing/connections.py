"""Finds connections to the model's server that the httpx tap does not see, so that a run can report them."""

from __future__ import annotations

import socket
import sys
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from functools import lru_cache
from types import FrameType
from typing import Any, Protocol

TAPPED = ("httpcore", "httpcore2")
"""Packages that open httpx's connections; their calls are recorded."""

OTHERS = ("requests", "urllib3", "aiohttp", "httplib2", "tornado", "urllib", "http")
"""Packages that open connections without httpx."""


_sending: ContextVar[bool] = ContextVar("agentrig_sending", default=False)
"""Whether an httpx client is sending in this context, or in a task that was started in it."""


def marked(send: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return an asynchronous client's `send` whose connections count as httpx's, whichever task opens them."""

    async def sent(self: Any, request: Any, **options: Any) -> Any:
        before = _sending.set(True)
        try:
            return await send(self, request, **options)
        finally:
            _sending.reset(before)

    return sent


class RolloutRecorder(Protocol):
    """The recorder of the rollout in which such a connection was made."""

    server: tuple[str, int] | None

    def miss(self, library: str) -> None:
        """Count a connection."""


def watch(active: Callable[[], RolloutRecorder | None]) -> None:
    """Report unrecorded connections to the rollout that made them; can't be undone, so call it once per process."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event != "socket.connect":
            return
        rollout = active()
        if rollout is None or rollout.server is None or _sending.get() or not _is(rollout.server, args[1]):
            return
        library = _library(sys._getframe())
        if library:
            rollout.miss(library)

    sys.addaudithook(hook)


def _is(server: tuple[str, int], address: Any) -> bool:
    """Whether an address that a socket connects to is that server's."""
    if not isinstance(address, tuple) or len(address) < 2 or address[1] != server[1]:
        return False
    host = str(address[0])
    return host == server[0] or host in _addresses(server[0])


@lru_cache(maxsize=64)
def _addresses(host: str) -> frozenset[str]:
    try:
        return frozenset(str(found[4][0]) for found in socket.getaddrinfo(host, None))
    except OSError:
        return frozenset()


def _library(frame: FrameType | None) -> str:
    """Return the outermost package that makes calls without httpx; '' if the connection is httpx's."""
    found = "another library"
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).split(".")[0]
        if package in TAPPED:
            return ""
        if package in OTHERS:
            found = package
        frame = frame.f_back
    return found
