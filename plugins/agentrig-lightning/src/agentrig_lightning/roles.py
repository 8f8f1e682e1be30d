"""The environment variables by which Agent Lightning splits a run over machines: honoured, or refused."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import attrs

from agentrig.errors import ConfigError
from agentrig_lightning.joining import LightningRunners

log = logging.getLogger(__name__)

ROLES = ("algorithm", "runner", "both")
PORT = 4747
"""Agent Lightning's default port."""


def wanted(environment: Mapping[str, str]) -> bool:
    """Return whether the environment asks for a store, or for something that a run can't be."""
    role, host, port = (environment.get(f"AGL_{n}", "").strip() for n in ("CURRENT_ROLE", "SERVER_HOST", "SERVER_PORT"))
    return bool(role not in ("", "both") or host or port or _unmanaged(environment))


def _unmanaged(environment: Mapping[str, str]) -> bool:
    return environment.get("AGL_MANAGED_STORE", "1").strip().lower() in ("0", "false", "no", "off")


def with_roles(runners: LightningRunners, environment: Mapping[str, str]) -> LightningRunners:
    """Return the settings with what `AGL_CURRENT_ROLE`, `AGL_SERVER_HOST` and `AGL_SERVER_PORT` ask for.

    The role `algorithm` runs no agent here. `runners.store` counts more than an address from the environment; without
    either, the store is on Agent Lightning's own port of this machine.

    Raises:
        ConfigError: They ask for what `agentrig train` does not do: the role of a runner, or a store of another.
    """
    role = environment.get("AGL_CURRENT_ROLE", "").strip()
    host, port = (environment.get(f"AGL_SERVER_{name}", "").strip() for name in ("HOST", "PORT"))
    if _unmanaged(environment):
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
