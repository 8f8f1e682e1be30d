"""Where a run's agents run: what `[runners] use` means for an algorithm that starts runners itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrig.errors import ConfigError

if TYPE_CHECKING:
    from agentrig.plugins.registry import Component

OWN = "own"
"""The name of the runners that an algorithm brings itself."""

PROCESSES = "processes"
"""The runners of an algorithm that brings none, if `[runners] use` names no others."""


def resolved(algorithm: Component, use: str) -> str:
    """Return the name of a run's runners.

    Args:
        algorithm: The run's algorithm.
        use: What `[runners] use` says, or `auto`.

    Raises:
        ConfigError: The algorithm's own are asked for, and it has none.
    """
    brings = bool(getattr(algorithm.spec, "runners", False))
    if use == "auto":
        return OWN if brings else PROCESSES
    if use == OWN and not brings:
        raise ConfigError(
            f'[runners] use = "{OWN}": algorithm {algorithm.spec.name} brings no runners of its own; leave it out, or '
            "name others that `agentrig plugins` lists"
        )
    return use
