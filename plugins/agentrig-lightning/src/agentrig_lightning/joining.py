"""How runners of other machines join a run: its address, its token, and the variables of Agent Lightning for that."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Mapping

import attrs

from agentrig.endpoints import is_loopback
from agentrig.errors import ConfigError
from agentrig.findings import Finding, Situation
from agentrig.pools import RunnerSettings
from agentrig.secrets import Secret
from agentrig.settings import setting

log = logging.getLogger(__name__)

TOKEN_VARIABLE = "AGL_STORE_TOKEN"
"""The environment variable that holds a store's token. Agents don't get it: `AGENTRIG_*` they would."""

JOIN, ALIVE, REPORT, LEAVE = (f"/v1/agentrig/{name}" for name in ("join", "alive", "report", "leave"))
"""The routes that runners of agentrig use beside those of Agent Lightning's store."""

ROLES = ("algorithm", "runner", "both")
PORT = 4747
"""Agent Lightning's default port."""

RUNNING, ENDED = "running", "ended"
"""The states of a run, as `ALIVE` tells them."""


@attrs.frozen(kw_only=True)
class LightningRunners(RunnerSettings):
    """Settings of the runners `lightning`, beside those of all runners."""

    n: int = setting(
        2,
        help="runners of this machine, each holds the agent; 0: only others run it",
        ge=0,
        le=1024,
    )
    store: str = setting(
        "", help="HOST:PORT at which runners of other machines join (--store); empty: AGL_SERVER_HOST and _PORT"
    )
    store_token: Secret | None = setting(
        None, secret=True, help="the token that these runners bring; a random one is printed when it is not set"
    )
    lease_s: float = setting(
        30.0, help="seconds without a sign of life after which such a runner's rollouts start again", ge=5
    )


def address_of(text: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`, or of a port alone, which listens on loopback."""
    host, _, port = text.strip().rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if port.isdecimal() and int(port) > 65535:
        raise ConfigError(f'runners.store = "{text}": {port} is no port, write one of 1 to 65535')
    if not port.isdecimal() or "/" in host:
        raise ConfigError(f'runners.store = "{text}" is no address: write HOST:PORT, for example 127.0.0.1:4747')
    return host, int(port)


def checked_token(given: Secret | None) -> str:
    """Return the token that the user gave, or a random one; refuse one that is too short to keep anybody out."""
    if given is None:
        return secrets.token_urlsafe(24)
    token = given.reveal()
    if len(token) < 16:
        raise ConfigError("runners.store_token is shorter than 16 characters: leave it out for a random one")
    return token


def wanted(environment: Mapping[str, str]) -> bool:
    """Return whether the environment asks for a store, or for something that a run can't be."""
    host, port = _server_of(environment)
    return bool(role_of(environment) not in ("", "both") or host or port or unmanaged(environment))


def role_of(environment: Mapping[str, str]) -> str:
    """Return the role that the environment asks for; '' if none."""
    return environment.get("AGL_CURRENT_ROLE", "").strip()


def _server_of(environment: Mapping[str, str]) -> tuple[str, str]:
    host, port = (environment.get(f"AGL_SERVER_{name}", "").strip() for name in ("HOST", "PORT"))
    return host, port


def unmanaged(environment: Mapping[str, str]) -> bool:
    """Return whether the environment asks for a store that a run does not have of its own."""
    return environment.get("AGL_MANAGED_STORE", "1").strip().lower() in ("0", "false", "no", "off")


def with_roles(runners: LightningRunners, environment: Mapping[str, str]) -> LightningRunners:
    """Return the settings with what `AGL_CURRENT_ROLE`, `AGL_SERVER_HOST` and `AGL_SERVER_PORT` ask for.

    The role `algorithm` runs no agent here. `runners.store` counts more than an address from the environment; without
    either, the store is on Agent Lightning's own port of this machine.
    """
    role, (host, port) = role_of(environment), _server_of(environment)
    if unmanaged(environment):
        raise ConfigError("AGL_MANAGED_STORE=0: a run has a store of its own. Unset it; --store HOST:PORT serves it")
    if role and role not in ROLES:
        raise ConfigError(f'AGL_CURRENT_ROLE="{role}" is none of {", ".join(ROLES)}')
    if port and not port.isdigit():
        raise ConfigError(f'AGL_SERVER_PORT="{port}" is no port')
    address = f"{host or '127.0.0.1'}:{port or PORT}"
    if role == "runner":
        raise ConfigError(
            "AGL_CURRENT_ROLE=runner: `agentrig train` is the algorithm's side. Join the other side's run with: "
            f"agentrig runner --store http://{address}"
        )
    asked = attrs.evolve(runners, store=runners.store or address, n=0 if role == "algorithm" else runners.n)
    if asked != runners:
        log.info(
            "the environment (AGL_CURRENT_ROLE=%s, AGL_SERVER_HOST=%s, AGL_SERVER_PORT=%s) asks for runners.store=%s "
            "and runners.n=%d",
            *(role or "-", host or "-", port or "-", asked.store, asked.n),
        )
    return asked


def check_gateway(situation: Situation) -> Iterator[Finding]:
    """If the run has a gateway: do runners of other machines reach it?"""
    plan = situation.plan
    if plan is None or not isinstance(plan.runners, LightningRunners) or not plan.uses_gateway:
        return
    store, host = plan.runners.store.rpartition(":")[0].strip("[]"), plan.gateway.host
    if store and not is_loopback(store) and is_loopback(host):
        yield Finding.warning(
            "runners of other machines",
            f"runners join from other machines at {store}, and the gateway listens on {host} only",
            cure="let it listen where they reach it: gateway.host=0.0.0.0, in a private network",
        )
