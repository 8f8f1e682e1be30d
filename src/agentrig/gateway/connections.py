"""The gateway's connections to model servers: kept open, bounded in number."""

from __future__ import annotations

import ssl
from functools import cached_property
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

from agentrig.endpoints import without_proxy

MOST = 512
"""Most connections to one server; further calls wait for one."""

IDLE_S = 4.0
"""Seconds that an idle connection is kept: less than uvicorn's 5, after which a server may close it under a call."""

TIMEOUTS = {"connect": 30.0, "read": None, "write": None, "pool": None}
"""Of a call, in seconds: a call may take as long as its rollout."""


class Connections:
    """Connections by server. httpx's transport alone: no redirects, no cookies, nothing of the environment's."""

    def __init__(self) -> None:
        self._transports: dict[tuple[str, str], httpx.AsyncHTTPTransport] = {}

    async def post(self, url: str, body: bytes, headers: dict[str, str]) -> httpx.Response:
        """Send a request and return the response, whose body is not read.

        Raises:
            httpx.TransportError: The server does not answer.
        """
        request = httpx.Request("POST", url, headers=headers, content=body, extensions={"timeout": TIMEOUTS})
        return await self._transport(request.url).handle_async_request(request)

    def _transport(self, url: httpx.URL) -> httpx.AsyncHTTPTransport:
        key = url.scheme, url.netloc.decode()
        found = self._transports.get(key)
        if found is None:
            found = self._transports[key] = httpx.AsyncHTTPTransport(
                verify=self._certificates if url.scheme == "https" else False,
                limits=httpx.Limits(max_connections=MOST, max_keepalive_connections=MOST, keepalive_expiry=IDLE_S),
                proxy=_proxy(str(url)),
            )
        return found

    @cached_property
    def _certificates(self) -> ssl.SSLContext:
        return httpx.create_ssl_context()


def _proxy(url: str) -> str | None:
    """Return the proxy that the environment names for a server; none for one on a private address."""
    without_proxy(url)
    parts, proxies = urlsplit(url), getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    return None if proxy is None or proxy_bypass(parts.netloc) else proxy
