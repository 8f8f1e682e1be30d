"""The gateway's connections to model servers: kept open, bounded in number.

By aiohttp: a call through httpx costs more than twice the CPU time of all the rest that the gateway does
(`docs/benchmarks.md`).
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

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

        A server may close a kept connection at the moment at which a call takes it: such a call is sent once more.

        Raises:
            One of `FAILED`: The server does not answer.
        """
        try:
            return await self._post(url, body, headers)
        except aiohttp.ServerDisconnectedError:
            return await self._post(url, body, headers)

    async def _post(self, url: str, body: bytes, headers: dict[str, str]) -> aiohttp.ClientResponse:
        return await self._session.post(url, data=body, headers=headers, allow_redirects=False, proxy=_proxy(url))

    @cached_property
    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=MOST, keepalive_timeout=IDLE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        )


@lru_cache(maxsize=256)
def _proxy(url: str) -> str | None:
    """Return the proxy that the environment names for a server; none for one on a private address."""
    without_proxy(url)
    parts, proxies = urlsplit(url), getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    return None if proxy is None or proxy_bypass(parts.netloc) else proxy
