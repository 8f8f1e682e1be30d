"""Connections to the model's server that the tap at httpx does not see: who made them, so that a run can say so."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from functools import lru_cache
from types import FrameType
from typing import Any, Protocol

TAPPED = ("httpcore", "httpcore2")
"""Packages that open httpx's connections; their calls are recorded."""

OTHERS = ("requests", "urllib3", "aiohttp", "httplib2", "tornado", "urllib", "http")
"""Packages that make calls of their own."""


class Rollout(Protocol):
    """What is told of such a connection: the recorder of the rollout that it was made in."""

    server: tuple[str, int] | None

    def miss(self, library: str) -> None:
        """Count a connection."""


def watch(active: Callable[[], Rollout | None]) -> None:
    """Tell rollouts of connections to their server that nothing records; for good, so call it once a process.

    Args:
        active: Returns the recorder of the rollout under way in this context, or None.
    """

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event != "socket.connect":
            return
        rollout = active()
        if rollout is None or rollout.server is None or not _is(rollout.server, args[1]):
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
    """Return the outermost package that makes calls of its own; '' when the connection is httpx's."""
    found = "another library"
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).split(".")[0]
        if package in TAPPED:
            return ""
        if package in OTHERS:
            found = package
        frame = frame.f_back
    return found
