"""Keys that moved to another section: their former names are accepted in run files, recipes and overrides."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from agentrig.plugins.specs import RUN_KINDS
from agentrig.settings import former_names

if TYPE_CHECKING:
    from agentrig.plugins.components import Component
    from agentrig.plugins.registry import Registry

log = logging.getLogger(__name__)

Sections = Mapping[str, Mapping[str, Any]]


def with_moved_keys(sources: Sequence[Sections], registry: Registry) -> Iterator[Sections]:
    """Yield the sources of a plan, with keys that moved (`setting(former="section.name")`) in their new place.

    A key stays where it is if the chosen component of that section has it itself, or is an algorithm that asks for no
    server. Each key that moved is warned of.
    """
    moved = {
        (section, key): (kind, name)
        for kind in RUN_KINDS
        for component in registry.components(kind)
        for former, name in former_names(component.spec.config).items()
        if "." in former
        for section, _, key in [former.partition(".")]
        if any(_lost(key, chosen) for chosen in _chosen(section, sources, registry))
    }
    for settings in sources:
        found: dict[str, dict[str, Any]] = {section: dict(keys) for section, keys in settings.items()}
        for (section, key), (kind, name) in moved.items():
            if key in found.get(section, {}):
                found.setdefault(kind, {})[name] = found[section].pop(key)
                log.warning("[%s] %s is now called %s, in [%s]: write %s.%s", *(section, key, name, kind, kind, name))
        yield found


def _chosen(section: str, sources: Sequence[Sections], registry: Registry) -> list[Component]:
    """Return the component that a section uses after all sources."""
    uses = [settings[section]["use"] for settings in sources if "use" in settings.get(section, {})]
    return [c for c in registry.components(section) if uses and c.answers_to(str(uses[-1]))]


def _lost(key: str, chosen: Component) -> bool:
    return getattr(chosen.spec, "server", True) and key not in attrs.fields_dict(chosen.spec.config)
