"""Merging the settings of a plan, and selecting the component of each kind with its config object."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import attrs

from agentrig.errors import ConfigError, LookupFailed, nearest
from agentrig.plugins import auto, composing, observing
from agentrig.plugins.building import built
from agentrig.plugins.specs import RUN_KINDS
from agentrig.pools import RunnerSettings
from agentrig.refusals import Learning, refuses_replies
from agentrig.settings import check_any, structure

if TYPE_CHECKING:
    from agentrig.plugins.registry import Component, Registry

log = logging.getLogger(__name__)

MATCHING = "agent-match"
"""The adapter of a run that names none; it then trains every call of the agent."""

SECTIONS = ("run", *RUN_KINDS, "gateway", "prompts", *observing.SECTIONS, composing.SECOND)


def check_section(section: str) -> None:
    """Raise if plans have no such section."""
    if section not in SECTIONS:
        raise ConfigError(
            f'there is no section "{section}".{nearest(section, SECTIONS)} Sections: {", ".join(SECTIONS)}',
            key=(section, ""),
        )


def plain_name(use: Any) -> str:
    """Return `name` of `distribution:name`."""
    return str(use).rpartition(":")[2]


def own_first(recipe: Component, registry: Registry) -> dict[str, dict[str, Any]]:
    """Return a recipe's settings; a name that several plugins bring means the one of the recipe's own package."""

    def own(kind: str, name: Any) -> Any:
        if isinstance(name, list):
            return [own(kind, each) for each in name]
        return registry.nearby(kind, name, recipe) if isinstance(name, str) else name

    spec: Any = recipe.spec
    settings = {section: dict(keys) for section, keys in spec.settings.items()}
    for section, keys in settings.items():
        if "use" in keys:
            keys["use"] = own(observing.SECTION if section == observing.TRACKERS else section, keys["use"])
    if composing.SECOND in settings.get("run", {}):
        settings["run"][composing.SECOND] = own("reward", settings["run"][composing.SECOND])
    parts = settings.get("reward", {}).get("parts")
    if isinstance(parts, Mapping):
        tables = {name: keys if isinstance(keys, Mapping) else {"weight": keys} for name, keys in parts.items()}
        meant = {name: own("reward", table.get("use", name)) for name, table in tables.items()}
        settings["reward"]["parts"] = {
            name: keys if meant[name] == name else {**tables[name], "use": meant[name]} for name, keys in parts.items()
        }
    return settings


def merge(into: dict[str, dict[str, Any]], more: Mapping[str, Mapping[str, Any]], registry: Registry) -> None:
    """Merge settings into others, in place; another component drops those of the one before that it does not share.

    Args:
        into: Section to its keys.
        more: The same; its keys win.
    """

    def common(section: str) -> Mapping[str, Any] | None:
        """Return what a former component's settings and a new one's have from one class; None for the same component.

        That class is the nearest that both derive from.
        """
        old, new = into[section].get("use"), more[section].get("use")
        names = str(old), str(new)
        known = registry.components(section)
        if None in (old, new) or old == new or any(all(map(c.answers_to, names)) for c in known):
            return None
        if section == "credit":
            return {}  # what was chosen for one formula says nothing of another
        if section == "runners":
            return attrs.fields_dict(RunnerSettings)  # the keys of all runners
        try:
            first, second = (getattr(registry.find(section, name).spec.config, "__mro__", ()) for name in names)
        except LookupFailed:
            return {}  # told when the component is built
        shared = next((c for c in second if c in first and attrs.has(c)), None)
        return attrs.fields_dict(shared) if shared is not None else {}

    shared = {section: common(section) for section in more if section in RUN_KINDS}
    if shared.get("agent") is not None:
        into["prompts"] = {}  # the former agent's
    if shared.get("algorithm") == {}:
        into["server"], into["credit"] = {}, {}  # the former algorithm's
    elif shared.get("algorithm") is not None and not _takes_credit(more["algorithm"]["use"], registry):
        into["credit"] = {}
    for section, keys in more.items():
        check_section(section)
        if section in observing.SECTIONS:
            observing.merge(into[section], keys, section)
            continue
        if (kept := shared.get(section)) is not None:
            into[section] = {key: value for key, value in into[section].items() if key in kept}
        for key, value in keys.items():
            old = into[section].get(key)
            into[section][key] = {**old, **value} if isinstance(value, Mapping) and isinstance(old, Mapping) else value


def tell_dropped(
    layers: Sequence[tuple[str, Mapping[str, Mapping[str, Any]]]],
    keys: Mapping[str, Any],
    credit: Component,
    registry: Registry,
) -> None:
    """Log what a run's credit has in place of settings that a recipe or a run file has for another credit.

    Args:
        layers: Name and settings of the recipe and of the run file.
        keys: The plan's keys of `[credit]`.
    """
    if "use" not in keys:  # the algorithm chose the credit: nobody expects the keys of another
        return
    set_for: dict[str, tuple[str, str, Any]] = {}
    former = ""
    for place, settings in layers:
        section = settings.get("credit", {})
        former = str(section.get("use", former))
        set_for |= {key: (former, place, value) for key, value in section.items() if key != "use"}
    spec: Any = credit.spec
    fields = attrs.fields_dict(spec.config)
    for key, (former, place, value) in set_for.items():
        if key in keys or credit.answers_to(former):
            continue
        try:
            before: Any = registry.find("credit", former).spec
        except LookupFailed:
            continue
        known = [cls[key] for cls in (fields, attrs.fields_dict(before.config)) if key in cls]
        if not known or value == known[0].default:  # nothing is other than it was
            continue
        has = f": {key} is {known[0].default}, its default" if key in fields else f" has no {key}"
        if any(field.metadata.get("secret") for field in known):
            has, value = f" has no {key} of its own", key
        log.info("credit %s%s; %s's %s is for credit %s", spec.name, has, place, value, before.name)


def _takes_credit(name: Any, registry: Registry) -> bool:
    try:
        return bool(getattr(registry.find("algorithm", str(name)).spec, "credit", ""))
    except LookupFailed:
        return True  # told when the component is built


def select_all(
    merged: Mapping[str, Mapping[str, Any]], registry: Registry, elsewhere: Callable[[str], str]
) -> tuple[Deferred, Deferred, Deferred]:
    """Return component, config object and the reason of `auto`, by kind; `auto` is resolved on first access."""

    def others(kind: str, key: str, component: Component | None = None) -> str:
        return elsewhere(key) or _of_another(kind, key, registry, component)

    def select(kind: str, use: str, keys: Mapping[str, Any]) -> tuple[Component, Any]:
        try:
            component = registry.find(kind, use)
        except LookupFailed as error:
            error.key = (kind, "use")
            raise
        owner = f"{use} ({component.source})"
        try:
            has = partial(others, kind, component=component)
            of: Any = {"owner": owner, "section": kind, "elsewhere": has, "shown": component.shown}
            return component, structure(component.spec.config, keys, **of)
        except ConfigError:
            if kind == "algorithm":  # whose limits need not be mended if the loss can't be the credit's
                _check_loss(component.spec.name, keys, merged["credit"], registry)
            raise

    components: dict[str, Component] = {}
    configs: dict[str, Any] = {}
    auto_keys: dict[str, dict[str, Any]] = {}
    for kind in RUN_KINDS:
        keys = dict(merged[kind])
        use = keys.pop("use", "auto" if kind in ("credit", "hardware", "server", "runners") else None)
        if kind == "adapter" and use is None and any(c.answers_to(MATCHING) for c in registry.components(kind)):
            use, keys = MATCHING, {"match": "", **keys}
        if not isinstance(use, str):
            names = ", ".join(c.spec.name for c in registry.components(kind))
            wrong = "does not say what to use" if use is None else f"use = {use!r:.80} must be text"
            raise ConfigError(f'[{kind}] {wrong}; write use = "NAME" with one of: {names or "none"}')
        if kind in auto.NOUNS:
            use = auto.used_by(registry, components["algorithm"], kind, use, keys)
        if kind in ("hardware", "server") and use == "auto":
            auto_keys[kind] = keys
        else:
            components[kind], configs[kind] = select(kind, use, keys)
    algorithm = components["algorithm"]
    for kind, owner, able in (
        ("hardware", f"no hardware for {algorithm.spec.name}", auto.able(registry, algorithm)),
        ("server", "no server that `auto` selects from", auto.ranked_servers(registry)),
    ):
        classes, keys = [c.spec.config for c in able], auto_keys.get(kind, {})
        check_any(classes, keys, owner=owner, section=kind, elsewhere=partial(others, kind))

    @cache
    def chosen(kind: str) -> tuple[Component, Any, str]:
        why = ""
        if kind == "hardware":
            name = auto.auto_hardware(registry, components["algorithm"])
        else:
            hardware = built(selected["hardware"], settings["hardware"])
            component, why = auto.auto_server(registry, hardware, auto_keys[kind])
            name = registry.reference(component)
        return *select(kind, name, auto_keys[kind]), why

    def later(n: int) -> dict[str, Callable[[], Any]]:
        return {kind: lambda kind=kind: chosen(kind)[n] for kind in auto_keys}  # type: ignore[misc]

    selected, settings, reasons = Deferred(components, later(0)), Deferred(configs, later(1)), later(2)
    reasons.pop("hardware", None)  # `auto` gives none
    return selected, settings, Deferred({}, reasons)


def _check_loss(algorithm: str, keys: Mapping[str, Any], credit: Mapping[str, Any], registry: Registry) -> None:
    """Raise if the credit that a plan names has no meaning with the loss that it names."""
    why = refuses_replies(None, Learning(loss=str(keys.get("loss", ""))))
    for found in registry.components("credit") if why else ():
        spec: Any = found.spec
        if spec.refuses is refuses_replies and found.answers_to(str(credit.get("use"))):
            raise ConfigError(f"[credit] {spec.name} with the algorithm {algorithm}: {why}")


def elsewhere(key: str, merged: Mapping[str, Mapping[str, Any]], registry: Registry, own: Mapping[str, type]) -> str:
    """Return ` It is a key of [SECTION]: write SECTION.key.`, for each section of this plan that has it, or ''."""
    if key == "recipe":
        return ' A run file names it above all sections, recipe = "mini", and a command as its first word.'
    classes = {section: [cls] for section, cls in own.items()}
    for kind in RUN_KINDS:
        use = plain_name(merged[kind].get("use", "auto"))  # `auto`: any of its kind
        if kind == "runners" and use == "auto":
            use = auto.PROCESSES
        if kind == "credit" and use == "auto":
            named = plain_name(merged["algorithm"].get("use", ""))
            specs: list[Any] = [c.spec for c in registry.components("algorithm")]
            use = next((spec.credit for spec in specs if spec.name == named), "") or auto.OWN
        found_here = [c for c in registry.components(kind) if use in (c.spec.name, "auto")]
        if kind == "server" and use == "auto":
            found_here = list(auto.ranked_servers(registry))
        classes[kind] = [c.spec.config for c in found_here]
        if kind == "algorithm" and not any(getattr(c.spec, "server", False) for c in found_here):
            merged = {**merged, "server": {"use": auto.OWN}}
    in_use = {plain_name(name) for s in observing.SECTIONS for name in observing.used(merged[s], s)}
    for c in registry.components(observing.SECTION):
        if c.spec.name in in_use:
            classes[f"{observing.section_of(c)}.{c.spec.name}"] = [c.spec.config]
    found: dict[str, str] = {}
    for section, configs in classes.items():
        for config in configs:
            if key in attrs.fields_dict(config):
                found[section] = f"{section}.{key}"
    sections, keys = " and ".join(f"[{s}]" for s in found), " or ".join(found.values())
    return f" It is a key of {sections}: write {keys}." if found else ""


def _of_another(kind: str, key: str, registry: Registry, component: Component | None = None) -> str:
    """Return ` It is a key of NAME.` for other components of its kind which have it, or ''.

    The only one is offered instead, unless it is an algorithm that trains something else.
    """
    found: list[Any] = [c.spec for c in registry.components(kind) if key in attrs.fields_dict(c.spec.config)]
    if not found:
        return ""
    *names, last = [spec.name for spec in found]
    trains = {getattr(spec, "trains", "") for spec in (*found, *([component.spec] if component else []))}
    selects = "" if names or len(trains) > 1 else f": {kind}.use={last} selects it"
    return f" It is a key of {', '.join(names)}{' and ' if names else ''}{last}{selects}."


class Deferred(Mapping[str, Any]):
    """A read-only mapping; each of its deferred values is computed once, on first access.

    Args:
        known: The values that are already known.
        later: Key to a function without arguments that computes its value. If it raises, the exception goes to the
            caller, and the next access calls the function again.
    """

    def __init__(self, known: Mapping[str, Any], later: Mapping[str, Callable[[], Any]]) -> None:
        self._known, self._later = dict(known), dict(later)

    def __getitem__(self, key: str) -> Any:
        if key in self._later:
            self._known[key] = self._later[key]()
            del self._later[key]
        return self._known[key]

    def __iter__(self) -> Iterator[str]:
        return iter([*self._known, *self._later])

    def __len__(self) -> int:
        return len(self._known) + len(self._later)
