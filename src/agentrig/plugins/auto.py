"""What a run gets for `use = "auto"`, and what `own` means: hardware, credit, the model's server, and runners."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from agentrig.errors import ConfigError, place_of
from agentrig.plugins.building import built
from agentrig.text import words_of

if TYPE_CHECKING:
    from agentrig.hardware.contract import Hardware
    from agentrig.plugins.registry import Component, Registry

log = logging.getLogger(__name__)

OWN = "own"
"""The name of the credit, the server and the runners that an algorithm brings itself."""

PROCESSES = "processes"
"""The runners of an algorithm that brings none, if `[runners] use` names no others."""

NOUNS: Mapping[str, str] = {"credit": "credit", "server": "model server", "runners": "runners"}

INSTEAD: Mapping[str, str] = {
    "credit": "decides itself what calls are worth, so a credit would not be used",
    "server": "brings its own model server, so another one would not be used; what it serves with is set by its own "
    "keys: agentrig plugins show {name}",
}
"""Why a credit or a server has no effect with an algorithm that brings its own."""


def able(registry: Registry, algorithm: Component) -> Iterator[Component]:
    """Yield the hardware that an algorithm's spec allows; if two have the same name, only the first."""
    named = getattr(algorithm.spec, "hardware", ())
    seen = set()
    for component in registry.components("hardware"):
        if component.spec.name not in seen and (not named or component.spec.name in named):
            seen.add(component.spec.name)
            yield component


def auto_hardware(registry: Registry, algorithm: Component) -> str:
    """Choose the available hardware that the algorithm can run on; one that cannot be built is left out.

    Raises:
        agentrig.hardware.HardwareError: None is available, one is broken, or two are available.
    """
    from agentrig.hardware.choice import select  # here, because every command imports this module

    installed: list[Hardware] = []
    for component in able(registry, algorithm):
        try:
            installed.append(built(component, component.spec.config()))
        except Exception as error:
            log.warning("hardware %s is left out: %s", component.spec.name, str(error).partition("\n")[0])
    return str(select("auto", [h for h in installed if h.carries(algorithm.spec.name)]).name)


def used_by(registry: Registry, algorithm: Component, kind: str, use: str, keys: Mapping[str, Any]) -> str:
    """Return the name of a run's credit, server or runners: `own` for what its algorithm brings itself.

    Args:
        kind: `credit`, `server` or `runners`.
        use: What `use` of that section says, or `auto`: for a credit the algorithm's default; for runners those that
            the environment asks for, else the algorithm's own, else processes. A server's `auto` is decided later.
        keys: The other keys of the section.

    Raises:
        ConfigError: The algorithm's own is asked for, and it brings none; or it brings its own credit or server, and
            another one, or a key of one, is asked for.
    """
    spec: Any = algorithm.spec
    brings = {"credit": not spec.credit, "server": not spec.server, "runners": spec.runners}[kind]
    if use == OWN and not brings:
        default = f" ({spec.credit} is its default)" if kind == "credit" else ""
        raise ConfigError(
            f'[{kind}] use = "{OWN}": algorithm {spec.name} brings no {NOUNS[kind]} of its own; leave it out{default}, '
            "or name another that `agentrig plugins` lists"
        )
    if kind == "runners":
        wanting: list[Any] = [c.spec for c in registry.components(kind) if use == "auto"]
        asked = [each.name for each in wanting if each.wanted is not None and each.wanted(os.environ)]
        return use if use != "auto" else str(asked[0]) if asked else OWN if brings else PROCESSES
    if not brings:
        return str(spec.credit) if kind == "credit" and use == "auto" else use
    if use in ("auto", OWN) and not keys:
        return OWN
    wish = " and ".join(keys) if use in ("auto", OWN) else f'use = "{use}"'
    instead = INSTEAD[kind].format(name=spec.name)
    raise ConfigError(f"[{kind}] {wish}: algorithm {spec.name} {instead}. Leave --{kind} and [{kind}] out")


def auto_server(registry: Registry, hardware: Hardware, keys: Mapping[str, Any]) -> tuple[Component, str]:
    """Choose the server with the highest rank that can serve on this hardware and has these keys.

    Returns:
        The server, and why it is this one.
    """
    passed: list[str] = []
    for component in ranked_servers(registry):
        known = {f.name for f in attrs.fields(component.spec.config)}
        unknown = [key for key in keys if key not in known]
        why = f"it has no key {' and '.join(unknown)}" if unknown else refusal(component, hardware)
        if not why:
            return component, "; ".join(passed) or f"it is the first that serves on {hardware.name}"
        passed.append(f"{component.spec.name}: {why}")
    raise ConfigError(
        f"[server] no model server can be used on {hardware.name}:\n"
        + "\n".join(f"  {line}" for line in passed or ["none is installed: pip install agentrig-grpo"])
    )


def refusal(component: Component, hardware: Hardware) -> str:
    """Return why a server can't serve on this hardware, or ''."""
    ask: Callable[[Hardware], str] | None = getattr(component.spec, "refusal", None)
    if ask is None:
        return ""
    try:
        return ask(hardware)
    except Exception as error:
        found = f"its `refusal` raised {words_of(error)}{place_of(error)}"
        log.warning("server %s is left out: %s", component.spec.name, found)
        return found


def ranked_servers(registry: Registry) -> Sequence[Component]:
    """Return the servers that `auto` selects from, the first choice first."""
    ranked = [c for c in registry.components("server") if getattr(c.spec, "rank", None) is not None]
    return sorted(ranked, key=lambda c: -c.spec.rank)  # type: ignore[attr-defined]
