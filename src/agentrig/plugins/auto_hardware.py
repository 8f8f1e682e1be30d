"""Hardware `auto`: selects a hardware that is available and that the algorithm can run on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from agentrig.hardware.choice import select
from agentrig.plugins.building import built
from agentrig.settings import check_any

if TYPE_CHECKING:
    from agentrig.hardware.contract import Hardware
    from agentrig.plugins.registry import Component, Registry

log = logging.getLogger(__name__)


def able(registry: Registry, algorithm: Component) -> Iterator[Component]:
    """Yield the hardware that an algorithm's spec allows; if two have the same name, only the first."""
    named = getattr(algorithm.spec, "hardware", ())
    seen = set()
    for component in registry.components("hardware"):
        if component.spec.name not in seen and (not named or component.spec.name in named):
            seen.add(component.spec.name)
            yield component


def built_or_none(component: Component) -> Hardware | None:
    """Build a hardware with its defaults, or return None with a warning if that fails."""
    try:
        hardware: Hardware = built(component, component.spec.config())
    except Exception as error:
        log.warning("hardware %s is left out: %s", component.spec.name, str(error).partition("\n")[0])
        return None
    return hardware


def auto_hardware(registry: Registry, algorithm: Component) -> str:
    """Choose the available hardware that the algorithm can run on.

    Raises:
        agentrig.hardware.HardwareError: None is available, one is broken, or two are available.
    """
    installed = [hardware for c in able(registry, algorithm) if (hardware := built_or_none(c)) is not None]
    return str(select("auto", [h for h in installed if h.carries(algorithm.spec.name)]).name)


def check_auto_keys(
    registry: Registry, algorithm: Component, keys: Mapping[str, Any], elsewhere: Callable[[str], str]
) -> None:
    """Reject keys of `[hardware]` that no hardware has, before `auto` is resolved.

    `elsewhere` is that of `agentrig.settings.structure`.

    Raises:
        ConfigError: The algorithm can run on no hardware with such a key.
    """
    configs = [c.spec.config for c in able(registry, algorithm)]
    check_any(configs, keys, owner=f"no hardware for {algorithm.spec.name}", section="hardware", elsewhere=elsewhere)
