"""The keys of the agent `http`; every command imports this."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import attrs

from agentrig.secrets import Secret
from agentrig.settings import setting


def _address(_config: Any, field: Any, value: str) -> None:
    """Reject what is no address of a service."""
    parts = urlsplit(value)
    if not value and field.name == "health":
        return
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{field.name} = {value!r} is no address: write http://HOST:PORT/PATH")
    if parts.username or parts.password:
        raise ValueError(f"{field.name} has a password in it: name the service's key by api_key")
    if parts.path.endswith("/chat/completions"):
        raise ValueError(f"{field.name} = {value!r} is a model's address; the agent `http` needs that of your agent")


@attrs.frozen(kw_only=True)
class HttpConfig:
    """Keys of `http`."""

    url: str = setting(help="the address that gets each task by POST", validator=_address)
    api_key: Secret | None = setting(None, secret=True, help="the service's key")
    key_header: str = setting(
        "Authorization", help="the header with the service's key: `Bearer KEY` in Authorization, else the key alone"
    )
    timeout_s: float = setting(
        50.0, help="seconds for a rollout, with all tries; with restart_s below runners.deadline_s", gt=0
    )
    connect_s: float = setting(5.0, help="seconds for one connection to the service", gt=0)
    retries: int = setting(2, help="how often a request that was lost or refused for the moment is sent again", ge=0)
    restart_s: float = setting(
        60.0,
        help="how long rollouts wait for a service that can't be reached, as while it restarts, in seconds; this does "
        "not count for timeout_s",
        ge=0,
    )
    idempotent: bool = setting(
        True,
        help="the service runs a rollout once for each Idempotency-Key; false: only requests that certainly did not "
        "reach it are sent again",
    )
    reply_mb: int = setting(16, help="longest reply in MiB", ge=1, le=1024)
    callback: bool = setting(True, help="let the service answer 202 and post its answer to an address of the runner")
    callback_host: str = setting("127.0.0.1", help="the address at which runners take callbacks")
    callback_name: str = setting(
        "", help="the name by which the service reaches that host, if it is another one: host.docker.internal"
    )
    health: str = setting("", help="the address that `agentrig doctor` asks; by default url", validator=_address)


def key_headers(config: HttpConfig) -> dict[str, str]:
    """Return the headers with the service's key; none if it has no key."""
    if config.api_key is None:
        return {}
    bearer = "Bearer " if config.key_header.lower() == "authorization" else ""
    return {config.key_header: bearer + config.api_key.reveal()}
