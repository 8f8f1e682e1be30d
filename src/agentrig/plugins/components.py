"""The plugin system: finds plugins by entry point, isolates broken ones, looks components up by name."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal

import attrs

from agentrig.plugins.ranges import outside
from agentrig.plugins.specs import Spec

log = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class Component:
    """A spec and the plugin that registered it."""

    kind: str
    spec: Spec
    plugin: str
    distribution: str
    version: str

    def answers_to(self, name: str) -> bool:
        """Whether `name` means this component: `name`, `distribution:name` or `plugin:name`."""
        owner, qualified, own = name.rpartition(":")
        return own == self.spec.name and (not qualified or owner in (self.distribution, self.plugin))


@attrs.frozen(kw_only=True)
class PluginInfo:
    """The status of one plugin.

    Attributes:
        name: The entry point's name, or the file's stem; what `AGENTRIG_BLOCK` blocks (so does `distribution`).
        status: `ok`, `failed` (see `error`; other plugins still work) or `blocked` (never imported).
        origin: The module, or the file, that it was loaded from.
        declared: The range of agentrig that its distribution requires; '' if it names none.
        lethal: Whether a trial refused it: its import would end, or hold up, every process.
        disagrees: In which way the imported module is not the installed version; '' if it is.
        observes: The hooks `on_*` that it implements itself: every run calls them.
    """

    name: str
    distribution: str
    version: str
    status: Literal["ok", "failed", "blocked"]
    origin: str
    error: str | None = None
    components: Sequence[Component] = ()
    observes: Sequence[str] = ()
    declared: str = ""
    disagrees: str = ""
    lethal: bool = False

    @property
    def unsuited(self) -> str:
        """Why this plugin may not work with this agentrig, and what to do; '' if it is made for it."""
        version = outside(self.declared)
        return version and (
            f"plugin {self.name} ({self.distribution} {self.version}) is made for agentrig{self.declared}, and this is "
            f"agentrig {version}: install a version of {self.distribution} for this one"
        )

    @property
    def warning(self) -> str:
        """What may be wrong with this plugin although it loads, and what to do; '' if nothing is."""
        return self.unsuited or (
            self.disagrees and f"plugin {self.name} ({self.distribution} {self.version}): {self.disagrees}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the entry of `agentrig plugins --json`."""
        return {
            "distribution": self.distribution,
            "version": self.version,
            "name": self.name,
            "status": self.status,
            "origin": self.origin,
            "error": self.error,
            "observes": list(self.observes),
            "agentrig": self.declared or None,
            "warning": self.warning or None,
            "components": [{"kind": c.kind, "name": c.spec.name, "summary": c.spec.summary} for c in self.components],
        }
