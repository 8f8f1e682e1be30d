"""Endpoints: an OpenAI-compatible model server, how to find it and how to sample from it."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import attrs

from agentrig.errors import AgentrigError, nearest
from agentrig.secrets import Secret

SAMPLING_FIELDS: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "logit_bias": None,
}
"""The request fields that define the sampling distribution, and their value when a request leaves them out."""

LIMIT = ("max_tokens", "max_completion_tokens")
"""The two names of a reply's limit in requests; `Endpoint.sampling` has the first."""

RECORDED = "agentrig-recorded"
"""The header of calls that the run records, or makes itself. Its server counts the calls without it."""

UNRECORDED = "/unrecorded"
"""Where such a server says how many there were: `GET base_url/unrecorded`."""


@attrs.frozen
class GatewayAddress:
    """A run's gateway: its URL, and the token with which a runner opens and closes rollouts there."""

    url: str
    token: str = attrs.field(repr=False)


@attrs.frozen(kw_only=True)
class Endpoint:
    """An OpenAI-compatible server and how to sample from it.

    Attributes:
        base_url: Ends in `/v1`.
        model: The model name to send.
        api_key: Sent as the bearer token; never logged.
        sampling: Request fields with the OpenAI API's names: `temperature`, `top_p`,
            `max_tokens`, `stop`, `seed`. The run adds those that a call lacks; see `sampled_as`.
        headers: Extra HTTP headers of every call. The run adds them.
        token_ids: Whether the server takes the request field `return_token_ids`, as vLLM and
            agentrig's own server do. The tracer then asks for ids and log-probabilities with every
            call; without them nothing can be trained.
        gateway: The gateway through which the agent calls this server; None for none. An agent never sees it: the
            runner gives it an endpoint whose `base_url` and `api_key` are those of its rollout at the gateway.
    """

    base_url: str
    model: str
    api_key: str = attrs.field(default="none", repr=False)
    sampling: Mapping[str, Any] = attrs.field(factory=dict)
    headers: Mapping[str, str] = attrs.field(factory=dict)
    token_ids: bool = False
    gateway: GatewayAddress | None = None

    @classmethod
    def at(cls, base_url: str, model: str, key: Secret | None = None, *, token_ids: bool = False) -> Endpoint:
        """Return the endpoint of a model that settings name by its address, its name there and its key, if any."""
        api_key = "none" if key is None else key.reveal()
        return cls(base_url=base_url.rstrip("/"), model=model, api_key=api_key, token_ids=token_ids)

    @property
    def reached_at(self) -> str:
        """The URL that an agent's machine must reach: the gateway's if there is one."""
        return self.gateway.url if self.gateway is not None else self.base_url

    @property
    def way(self) -> tuple[str, str]:
        """What is at `reached_at`, and the key of a run that sets where it listens, for messages."""
        return ("gateway", "gateway.host") if self.gateway is not None else ("model's server", "server.host")

    def unmarked(self) -> Endpoint:
        """Return the same endpoint without `RECORDED`, for an agent, whose clients may send all the headers."""
        return attrs.evolve(self, headers={k: v for k, v in self.headers.items() if k != RECORDED})

    def with_sampling(self, **fields: Any) -> Endpoint:
        """Return the same endpoint with these sampling fields added; they replace existing ones."""
        return attrs.evolve(self, sampling={**self.sampling, **fields})


def sampled_as(
    body: Mapping[str, Any], sampling: Mapping[str, Any], *, replace: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a request with a run's sampling fields, and those of its own values that they replace.

    A value equal to the run's is the request's own too, unless it has all of the run's: then they were passed on.
    Fields that the request lacks are added. `max_tokens` is a limit: of the request's and the run's the smaller holds.

    Args:
        replace: Whether `SAMPLING_FIELDS` replace those of the request too, as in a measurement.
    """
    sent, replaced = dict(body), {}
    passed_on = all(body.get(name) == value for name, value in sampling.items() if name in SAMPLING_FIELDS)
    for name, value in sampling.items():
        names = [n for n in (LIMIT if name == LIMIT[0] else (name,)) if body.get(n) is not None]
        if not names:
            sent[name] = value
        for own in names:
            asked = body[own]
            longer = name == LIMIT[0] and isinstance(asked, int) and isinstance(value, int) and asked > value
            if longer or (replace and name in SAMPLING_FIELDS and not passed_on):
                sent[own], replaced[own] = value, asked
    return sent, replaced


def unrecorded_calls(endpoints: Iterable[Endpoint]) -> int:
    """Return how many calls without `RECORDED` came to those servers that count them."""
    import urllib.request

    calls = 0
    for url, key in {(e.base_url, e.api_key) for e in endpoints if RECORDED in e.headers}:
        without_proxy(url)
        request = urllib.request.Request(url + UNRECORDED, headers={"Authorization": f"Bearer {key}"})
        with suppress(OSError, ValueError), urllib.request.urlopen(request, timeout=15) as reply:
            calls += int(json.load(reply)["calls"])
    return calls


PROXIES = tuple(form(f"{what}_proxy") for what in ("http", "https", "all") for form in (str.lower, str.upper))
"""The variables that name a proxy."""


def without_proxy(url: str) -> None:
    """Let this process's HTTP clients reach a server at a private address without the host's proxy.

    If `HTTP_PROXY` is set, calls to the run's own model server would otherwise go to a proxy that cannot reach it.
    For public addresses and for names other than localhost, set `NO_PROXY` yourself. Without a proxy it does nothing.
    """
    if sys.platform.startswith("linux"):
        proxied = any(map(os.environ.get, PROXIES))
    else:  # the system has settings too
        from urllib.request import getproxies  # it is slow to import, and every command imports this module

        proxied = bool(getproxies().keys() & {"http", "https", "all"})
    if not proxied:
        return
    host = urlsplit(url).hostname or ""
    try:
        private = host == "localhost" or ipaddress.ip_address(host).is_private
    except ValueError:
        private = False
    listed = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    known = [name.strip() for name in listed.split(",") if name.strip()]
    if private and host not in known and "*" not in known:
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join([*known, host])


ANY_HOST = ("", "0.0.0.0", "::")
"""Hosts of a server that listens on all addresses of its machine."""


def address_of(host: str, port: int, name: str = "") -> str:
    """Return the URL of a server; with this machine's name if it listens on all its addresses.

    Args:
        name: The host's name for clients that reach it by another one.
    """
    reached = name or (socket.gethostname() if host in ANY_HOST else host)
    return f"http://{f'[{reached}]' if ':' in reached else reached}:{port}"


def is_loopback(address: str) -> bool:
    """Return whether only this machine can reach an address: a URL, a host name or an IP address."""
    host = urlsplit(address).hostname if "//" in address else address
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


ADDRESSES = ("OPENAI_BASE_URL", "OPENAI_API_BASE")
"""The variables that name a model server, in the order in which they are read."""


def environment_address() -> str:
    """Return the name of the variable that names a model server; '' if there is none."""
    return next((name for name in ADDRESSES if os.environ.get(name)), "")


def environment_endpoint(
    url: str | None = None, *, model: str | None = None, api_key: str | None = None
) -> Endpoint | None:
    """Return the given endpoint, or the one named by the environment, or None.

    Reads `ADDRESSES` and `OPENAI_API_KEY`. The model is the server's first when none is given.

    Raises:
        AgentrigError: The server does not answer, or does not know the model; the message names the variable that the
            address is from.
    """
    variable = "" if url else environment_address()
    url = url or os.environ.get(variable, "")
    if not url:
        return None
    origin = f" (from ${variable})" if variable else ""
    if not url.lower().startswith(("http://", "https://")):
        raise AgentrigError(f"{url}{origin} is no address of a server: write http://HOST:PORT/v1")
    key = api_key or os.environ.get("OPENAI_API_KEY") or "none"
    url = url.rstrip("/")
    models = models_of(url, key, url_from=origin)
    if model is None:
        if not models:
            raise AgentrigError(f"{url}{origin} lists no models; name one with --model")
        model = models[0]
    elif models and model not in models:
        hint = nearest(model, models)
        raise AgentrigError(f'{url}{origin} has no model "{model}".{hint} It lists: {", ".join(models[:20])}')
    return Endpoint(base_url=url, model=model, api_key=key, sampling={"temperature": 0.0})


def models_of(url: str, key: str, *, key_from: str = "OPENAI_API_KEY", url_from: str = "") -> list[str]:
    """Return the names of a server's models; none if it does not list them.

    Args:
        key_from: Where the key comes from, for messages.
        url_from: Where the address comes from, as ` (from …)`, for messages; '' if the user named it.

    Raises:
        AgentrigError: It does not answer, or refuses the key.
    """
    import urllib.error
    import urllib.request

    without_proxy(url)
    try:
        request = urllib.request.Request(f"{url}/models", headers={"Authorization": f"Bearer {key}"})
        with urllib.request.urlopen(request, timeout=15) as reply:
            return [str(m["id"]) for m in json.load(reply).get("data", [])]
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return []  # not every server lists its models
        raise AgentrigError(
            f"{url}/models{url_from} answers {error.code} {error.reason}: check the address, and the key in {key_from}"
        ) from None
    except (OSError, ValueError) as error:
        raise AgentrigError(
            f"{url}{url_from} does not answer: {error}. Is the server up, and does its address end in /v1?"
        ) from None
    except (LookupError, TypeError, AttributeError):
        raise AgentrigError(
            f"{url}/models{url_from} gives no list of models: is it an OpenAI-compatible server?"
        ) from None


def port_taken(port: int, host: str = "127.0.0.1") -> bool:
    """Whether something listens on a port of an address of this machine already."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError:
        return True
    return False
