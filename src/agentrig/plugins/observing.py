"""Sections `[observer]` and `[trackers]`: the observers that a run names, and their settings.

They alone may name several components. Trackers are observers too: `ObserverSpec(tracker=True)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from agentrig.errors import ConfigError, LookupFailed, PluginError, nearest
from agentrig.plugins import hookspecs
from agentrig.plugins.building import built, defined_at, hooks_of
from agentrig.plugins.specs import ObserverSpec
from agentrig.secrets import sources
from agentrig.settings import structure

if TYPE_CHECKING:
    from agentrig.plugins.registry import Component, Registry

SECTION = ObserverSpec.kind

TRACKERS = "trackers"

SECTIONS = (SECTION, TRACKERS)

OPTIONS: Mapping[str, str] = {SECTION: "observer", TRACKERS: "tracker"}
"""Section to the option, and the word, for one of its components."""

HOOKS = tuple(name for name in vars(hookspecs) if name.startswith("on_"))
"""The hooks that an observer can have, in the order of a run."""

Observers = Sequence[tuple["Component", Any]]


def section_of(component: Component) -> str:
    """Return the section that names an observer."""
    return TRACKERS if getattr(component.spec, "tracker", False) else SECTION


def used(keys: Mapping[str, Any], section: str = SECTION) -> list[str]:
    """Return the names under `use`: one name, or a list of them."""
    use = keys.get("use", [])
    names = [use] if isinstance(use, str) and use else use or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f'[{section}] use = {use!r} must be a list of names: write use = ["NAME"]')
    return names


def merge(into: dict[str, Any], more: Mapping[str, Any], section: str = SECTION) -> None:
    """Merge a source's section into an earlier one's; the settings of observers that `use` drops are dropped too."""
    if "use" in more:
        names = used(more, section)
        for key in [k for k in into if k != "use" and not _name_in(k, names)]:
            del into[key]
    for key, value in more.items():
        old = into.get(key)
        into[key] = {**old, **value} if isinstance(value, Mapping) and isinstance(old, Mapping) else value


def selected(
    keys: Mapping[str, Any], registry: Registry, elsewhere: Callable[[str], str], section: str = SECTION
) -> Observers:
    """Return the observers that a section names, each with its checked settings.

    Args:
        keys: The section: `use`, and for each observer in use a table of its settings.
        elsewhere: As in `agentrig.settings.structure`.
        section: `observer` or `trackers`.
    """
    names, option = used(keys, section), OPTIONS[section]
    found: dict[str, tuple[Component, Any]] = {}
    for name in names:
        component = _found(name, section, registry)
        reference = registry.reference(component)
        if reference in found:
            raise ConfigError(f"[{section}] use names {reference} twice; leave one of them out")
        table: Any = next((keys[k] for k in (name, reference, component.spec.name) if k in keys), {})
        own = f"{section}.{component.spec.name}"
        if not isinstance(table, Mapping):
            raise ConfigError(f"[{section}] {component.spec.name} = {table!r}: write {own}.KEY=VALUE")
        owner = f"{name} ({component.source})"
        of: Any = {"owner": owner, "section": own, "elsewhere": elsewhere, "shown": component.shown}
        config: Any = structure(component.spec.config, table, **of)
        found[reference] = component, config
    for key, value in keys.items():
        if key == "use" or _name_in(key, names):
            continue
        if not isinstance(value, Mapping):
            raise ConfigError(
                f'[{section}] has no key "{key}".{elsewhere(key) or nearest(key, ["use", *names])}\n'
                f"  It has use = [NAMES], and a table [{section}.NAME] with the settings of each"
            )
        raise ConfigError(
            f"[{section}.{key}] has settings of {'an' if option[0] in 'aeiou' else 'a'} {option} that this run does "
            f"not use.{nearest(key, names)}\n"
            f"  Use it too: --{option} {key}, or use = {[*names, key]!r} under [{section}]".replace("'", '"')
        )
    return tuple(found.values())


def _found(name: str, section: str, registry: Registry) -> Component:
    """Look an observer up; one of the other section is an error."""
    try:
        component = registry.find(SECTION, name)
    except LookupFailed as error:
        if section == SECTION:
            raise
        there = [registry.reference(c) for c in registry.components(SECTION) if section_of(c) == TRACKERS]
        rest = str(error).split("\n")[2:]
        raise LookupFailed(
            "\n".join(
                [
                    f'there is no tracker called "{name}".{nearest(name, there)}',
                    f"  trackers: {', '.join(there) or 'none'}",
                    *rest,
                ]
            )
        ) from None
    right = section_of(component)
    if right != section:
        raise ConfigError(
            f"[{section}] use: {name} is {'a tracker' if right == TRACKERS else 'an observer and no tracker'}. Write "
            f'--{OPTIONS[right]} {name}, or use = ["{name}"] under [{right}]'
        )
    return component


def written(observers: Observers, registry: Registry) -> dict[str, dict[str, Any]]:
    """Return the sections of a run file that `selected` reads these observers from, with every default filled in."""
    found: dict[str, dict[str, Any]] = {}
    for component, config in observers:
        section, name = section_of(component), registry.reference(component)
        keys = found.setdefault(section, {"use": []})
        keys["use"].append(name)
        table = sources(attrs.asdict(config))
        if table:
            keys[name] = table
    return found


def build_observers(observers: Observers) -> dict[str, object]:
    """Build observers; return them by name."""
    made = {}
    for component, config in observers:
        observer = built(component, config)
        for hook in hooks_of(observer):
            wrong = _wrong(hook, getattr(observer, hook))
            if wrong:
                raise PluginError(
                    f"the observer {component.spec.name} cannot be used: {wrong}\n"
                    f"  it comes from plugin {component.plugin} ({component.source})"
                )
        made[component.spec.name if component.spec.name not in made else component.plugin] = observer
    return made


def _name_in(key: str, names: Sequence[str]) -> bool:
    """Whether a table's key means one of the observers in use: by its whole name, or without the distribution."""
    return key in names or key in {name.rpartition(":")[2] for name in names}


def _wrong(hook: str, method: Any) -> str:
    """Return why a run cannot call this method, or ''."""
    where = defined_at(method)
    if hook not in HOOKS:
        return f'unknown hook "{hook}"{where}.{nearest(hook, HOOKS)} The hooks are: {", ".join(HOOKS)}'
    if inspect.iscoroutinefunction(method):
        return f"`{hook}`{where} is async, and a run calls it without awaiting; write `def {hook}`"
    try:
        inspect.signature(method).bind(None)
    except TypeError as error:
        return f"`{hook}`{where} must take one argument: {error}"
    return ""
