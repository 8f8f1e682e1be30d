"""Section `[observer]`: the observers that a run names, and their settings. It alone may name several components."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from agentrig.errors import ConfigError, PluginError, nearest
from agentrig.plugins import hookspecs
from agentrig.plugins.building import built, defined_at, hooks_of
from agentrig.plugins.specs import ObserverSpec
from agentrig.secrets import sources
from agentrig.settings import structure

if TYPE_CHECKING:
    from agentrig.plugins.components import Component
    from agentrig.plugins.registry import Registry

SECTION = ObserverSpec.kind

HOOKS = tuple(name for name in vars(hookspecs) if name.startswith("on_"))
"""The hooks that an observer can have, in the order of a run."""

Observers = Sequence[tuple["Component", Any]]


def used(keys: Mapping[str, Any]) -> list[str]:
    """Return the names under `use`: one name, or a list of them.

    Raises:
        ConfigError: It is something else.
    """
    use = keys.get("use", [])
    names = [use] if isinstance(use, str) and use else use or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f'[{SECTION}] use = {use!r} must be a list of names: write use = ["NAME"]')
    return names


def merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Merge a source's section into an earlier one's; the settings of observers that `use` drops are dropped too."""
    if "use" in more:
        names = used(more)
        for key in [k for k in into if k != "use" and not _name_in(k, names)]:
            del into[key]
    for key, value in more.items():
        old = into.get(key)
        into[key] = {**old, **value} if isinstance(value, Mapping) and isinstance(old, Mapping) else value


def selected(keys: Mapping[str, Any], registry: Registry, elsewhere: Callable[[str], str]) -> Observers:
    """Return the observers that a section names, each with its checked settings.

    Args:
        keys: The section: `use`, and for each observer in use a table of its settings.
        registry: Where to look them up.
        elsewhere: As in `agentrig.settings.structure`.

    Raises:
        ConfigError: Two names mean one observer, or there are settings of an observer that is not in use, or settings
            are wrong.
        LookupFailed: There is no such observer.
    """
    names = used(keys)
    found: dict[str, tuple[Component, Any]] = {}
    for name in names:
        component = registry.find(SECTION, name)
        registry.use(component)
        reference = registry.reference(component)
        if reference in found:
            raise ConfigError(f"[{SECTION}] use names {reference} twice; leave one of them out")
        table: Any = next((keys[k] for k in (name, reference, component.spec.name) if k in keys), {})
        section = f"{SECTION}.{component.spec.name}"
        if not isinstance(table, Mapping):
            raise ConfigError(f"[{SECTION}] {component.spec.name} = {table!r}: write {section}.KEY=VALUE")
        owner = f"{name} ({component.distribution} {component.version})"
        config: Any = structure(component.spec.config, table, owner=owner, section=section, elsewhere=elsewhere)
        found[reference] = component, config
    for key, value in keys.items():
        if key == "use" or _name_in(key, names):
            continue
        if not isinstance(value, Mapping):
            raise ConfigError(
                f'[{SECTION}] has no key "{key}".{elsewhere(key) or nearest(key, ["use", *names])}\n'
                f"  It has use = [NAMES], and a table [{SECTION}.NAME] with the settings of each"
            )
        raise ConfigError(
            f"[{SECTION}.{key}] has settings of an observer that this run does not use.{nearest(key, names)}\n"
            f"  Use it too: --{SECTION} {key}, or use = {[*names, key]!r} under [{SECTION}]".replace("'", '"')
        )
    return tuple(found.values())


def written(observers: Observers, registry: Registry) -> dict[str, Any]:
    """Return the section of a run file that `selected` reads these observers from, with every default filled in."""
    named = {registry.reference(component): sources(attrs.asdict(config)) for component, config in observers}
    return {"use": list(named), **{name: keys for name, keys in named.items() if keys}}


def watchers(observers: Observers) -> dict[str, object]:
    """Build observers; return them by name.

    Raises:
        PluginError: One cannot be built, or what it built has a method `on_*` that no run can call.
    """
    made = {}
    for component, config in observers:
        observer = built(component, config)
        for hook in hooks_of(observer):
            wrong = _wrong(hook, getattr(observer, hook))
            if wrong:
                raise PluginError(
                    f"the observer {component.spec.name} cannot be used: {wrong}\n"
                    f"  it comes from plugin {component.plugin} ({component.distribution} {component.version})"
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
