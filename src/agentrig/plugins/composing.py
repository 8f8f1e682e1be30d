"""Rewards that are made of others: their parts are looked up, checked and built like a section `[reward]`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from agentrig.errors import ConfigError, nearest
from agentrig.plugins.building import built
from agentrig.plugins.specs import RewardSpec
from agentrig.rewards import Part
from agentrig.settings import structure

if TYPE_CHECKING:
    from agentrig.plugins.registry import Component, Registry
    from agentrig.rewards import Reward

KIND = RewardSpec.kind

Parts = Mapping[str, tuple["Component", Any]]
"""Name to the component of a part, and its config object."""

SECOND = "second_reward"
"""The section with the settings of the rewards in `run.second_reward`: a table for each."""


def parts_of(component: Component, config: Any, registry: Registry, *, section: str = KIND) -> Parts:
    """Return the parts of a reward, with checked settings; nothing for one that has none.

    Args:
        section: The section of its keys, for messages.
    """
    spec: Any = component.spec
    if spec.parts is None:
        return {}
    try:
        named = spec.parts(config)
    except ValueError as error:
        raise ConfigError(f"[{section}] {spec.name}: {error}") from error
    found = {}
    for name, keys in named.items():
        where = f"{section}.parts.{name}"
        keys = dict(keys)
        inner = registry.find(KIND, keys.pop("use", name))
        owner = f"{inner.spec.name} ({inner.source})"
        settings: Any = structure(inner.spec.config, keys, owner=owner, section=where, shown=inner.shown)
        parts_of(inner, settings, registry, section=where)
        found[name] = inner, settings
    return found


def build(component: Component, config: Any, registry: Registry) -> tuple[Reward, bool]:
    """Build a reward with its parts; return it, and whether it is called with the trace."""
    spec: Any = component.spec
    if spec.parts is None:
        return built(component, config), spec.sees_trace
    parts = {}
    for name, (inner, settings) in parts_of(component, config, registry).items():
        reward, sees_trace = build(inner, settings, registry)
        correct_at = getattr(inner.spec, "correct_at", None)
        parts[name] = Part(reward=reward, correct_at=correct_at, sees_trace=sees_trace)
    sees = spec.sees_trace or any(part.sees_trace for part in parts.values())
    return built(component, config, parts=parts), sees


def second_rewards(
    names: list[str], tables: Mapping[str, Any], registry: Registry, elsewhere: Callable[[str], str]
) -> tuple[tuple[Component, Any], ...]:
    """Return the rewards in `run.second_reward`, each with its checked settings.

    Args:
        tables: The section `[second_reward]`: a table of settings for each of them that needs any.
        elsewhere: As in `agentrig.settings.structure`.
    """
    found: dict[str, tuple[Component, Any]] = {}
    left = dict(tables)
    for name in names:
        component = registry.find(KIND, name)
        reference = registry.reference(component)
        if reference in found:
            raise ConfigError(f"run.second_reward names {reference} twice; leave one of them out")
        keys = left.pop(name, left.pop(reference, left.pop(component.spec.name, {})))
        section = f"{SECOND}.{component.spec.name}"
        if not isinstance(keys, Mapping):
            raise ConfigError(f"[{SECOND}] {name} = {keys!r}: write {section}.KEY=VALUE")
        owner = f"{name} ({component.source})"
        of: Any = {"owner": owner, "section": section, "elsewhere": elsewhere, "shown": component.shown}
        config: Any = structure(component.spec.config, keys, **of)
        parts_of(component, config, registry, section=section)
        found[reference] = component, config
    if left:
        key = next(iter(left))
        raise ConfigError(
            f"[{SECOND}.{key}] has settings of a reward that is no second reward of this run.{nearest(key, names)}\n"
            f"  Name it too: run.second_reward={[*names, key]!r}".replace("'", '"')
        )
    return tuple(found.values())
