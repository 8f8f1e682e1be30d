"""The gateway's connections to model servers: kept open, bounded in number.

By aiohttp: a call through httpx costs more than twice the CPU time of all the rest that the gateway does
(`tests/benchmarks/gateway.md`).
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import attrs

from agentrig.endpoints import without_proxy

MOST = 512
"""Most connections; further calls wait for one."""

IDLE_S = 4.0
"""Seconds that an idle connection is kept: less than uvicorn's 5, after which a server may close it under a call."""

CONNECT_S = 30.0
"""Seconds until a server must accept a connection; the call itself may take as long as its rollout."""

FAILED = (aiohttp.ClientError, OSError, TimeoutError)
"""What is raised when a server does not answer, or not to the end."""


class Connections:
    """Connections by server, without redirects and cookies."""

    async def post(self, url: str, body: bytes, headers: dict[str, str]) -> aiohttp.ClientResponse:
        """Send a request and return the response, whose body is not read.

        A server may close a kept connection at the moment at which a call takes it. So a call that was lost on a kept
        connection, before any part of its answer has come, is sent once more, on a new connection: other kept ones
        may be closed by then too.

        Raises:
            One of `FAILED`: The server does not answer.
        """
        used = _Used()
        try:
            return await self._post(self._kept, url, body, headers, used)
        except aiohttp.ClientConnectionError as error:
            answered = isinstance(error, aiohttp.ServerDisconnectedError) and not isinstance(error.message, str)
            if not used.kept or answered:
                raise
        return await self._post(self._new, url, body, headers, used)

    async def close(self) -> None:
        """Close all connections."""
        for session in (self._kept, self._new):
            await session.close()

    async def _post(
        self, session: aiohttp.ClientSession, url: str, body: bytes, headers: dict[str, str], used: _Used
    ) -> aiohttp.ClientResponse:
        return await session.post(
            url, data=body, headers=headers, allow_redirects=False, proxy=_proxy(url), trace_request_ctx=used
        )

    @cached_property
    def _kept(self) -> aiohttp.ClientSession:
        """Takes kept connections where there are any."""
        tracing = aiohttp.TraceConfig()
        tracing.on_connection_reuseconn.append(_note)
        return _session(aiohttp.TCPConnector(limit=MOST, keepalive_timeout=IDLE_S), [tracing])

    @cached_property
    def _new(self) -> aiohttp.ClientSession:
        """Makes a connection for each call."""
        return _session(aiohttp.TCPConnector(limit=MOST, force_close=True), [])


@attrs.define
class _Used:
    """Whether a call was sent on a kept connection."""

    kept: bool = False


async def _note(_session: Any, context: Any, _params: Any) -> None:
    context.trace_request_ctx.kept = True


def _session(connector: aiohttp.TCPConnector, tracing: list[aiohttp.TraceConfig]) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        trace_configs=tracing,
    )


@lru_cache(maxsize=256)
def _proxy(url: str) -> str | None:
    """Return the proxy that the environment names for a server; none for one on a private address."""
    without_proxy(url)
    parts, proxies = urlsplit(url), getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    return None if proxy is None or proxy_bypass(parts.netloc) else proxy
