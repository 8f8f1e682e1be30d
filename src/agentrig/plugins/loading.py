"""Loading: finds plugins by entry point or file, and isolates broken ones."""

from __future__ import annotations

import importlib.metadata
import logging
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pluggy

from agentrig.errors import PluginError, place_of
from agentrig.lightning_import import skip_litellm
from agentrig.plugins import hookspecs, trial
from agentrig.plugins.components import Component, PluginInfo
from agentrig.plugins.files import load_file as load_file
from agentrig.plugins.ranges import declared as declared_range
from agentrig.plugins.ranges import other_version, outside
from agentrig.plugins.registry import BLOCK_VARIABLE, Registry, _misspelled, _specs
from agentrig.plugins.specs import KINDS

GROUP = "agentrig"

log = logging.getLogger(__name__)


def _collect(manager: pluggy.PluginManager, name: str, distribution: str, version: str) -> list[Component]:
    """Call the `register_*` hooks of a single plugin, so that its errors do not affect the others."""
    found: list[Component] = []
    for kind, cls in KINDS.items():
        for impl in getattr(manager.hook, cls.hook).get_hookimpls():
            if impl.plugin_name != name:
                continue
            for spec in _specs(impl.function, kind, cls.hook):
                if any(c.kind == kind and c.spec.name == spec.name for c in found):
                    raise PluginError(f'{cls.hook} brings two components called "{spec.name}"; rename one of them')
                found.append(Component(kind=kind, spec=spec, plugin=name, distribution=distribution, version=version))
    return found


def blocked_names(block: Iterable[str] = ()) -> set[str]:
    """Return the names to block: `block` and the names in the variable `AGENTRIG_BLOCK`."""
    return {n.strip() for n in (*os.environ.get(BLOCK_VARIABLE, "").split(","), *block) if n.strip()}


def _cure(name: str, distribution: str) -> str:
    """Return what to do about a plugin that a trial refused."""
    gone = "" if distribution in ("file", "unknown") else f", uninstall it (pip uninstall {distribution})"
    again = "" if distribution == "file" else "; `agentrig plugins` tries it again"
    return f"It was not imported. Mend it{gone} or block it ({BLOCK_VARIABLE}={name}){again}"


def _disagreement(origin: str, error: BaseException) -> str:
    """Return what to do if an entry point names a module, or an object in it, that its package lacks; else ''."""
    module, _, attribute = origin.partition(":")
    lacks = isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}.")
    if lacks or (isinstance(error, AttributeError) and attribute and not place_of(error, installed=True)):
        return f'. The entry point says "{origin}", and the package lacks it: mend one of them, and reinstall it'
    return ""


def load(
    *,
    block: Iterable[str] = (),
    files: Iterable[str | Path] = (),
    strict: bool = False,
    tries: bool = True,
    retry: bool = False,
) -> Registry:
    """Find and load all plugins.

    Args:
        block: Plugin or distribution names that are not imported; `AGENTRIG_BLOCK` adds to them.
        files: Python files that are plugins too (a user's own agent in one file).
        strict: Raise for the first plugin that fails, or that is made for another agentrig, instead of continuing.
        tries: Whether new plugins are first tried in a process of their own (`agentrig.plugins.trial`).
        retry: Whether plugins that a trial refused before are tried again.

    Raises:
        PluginError: With `strict`, or when one of `files` cannot be loaded.
    """
    skip_litellm()  # a plugin may import Agent Lightning at its top
    manager = pluggy.PluginManager("agentrig")
    manager.add_hookspecs(hookspecs)
    blocked = blocked_names(block)
    plugins: list[PluginInfo] = []

    def add(
        name: str,
        dist: str,
        version: str,
        origin: str,
        importer: Callable[[], Any],
        *,
        required: bool,
        made_for: Callable[[], str] = str,
    ) -> None:
        declared = disagrees = ""

        def info(status: Literal["ok", "failed", "blocked"], **more: Any) -> PluginInfo:
            about: dict[str, Any] = {
                "name": name,
                "distribution": dist,
                "version": version,
                "origin": origin,
                "declared": declared,
                "disagrees": disagrees,
            }
            return PluginInfo(status=status, **about, **more)

        if name in blocked or dist in blocked:
            plugins.append(info("blocked"))
            return
        lethal = origin in refused
        try:
            if lethal:
                raise PluginError(f"{refused[origin]}. {_cure(name, dist)}")
            if manager.has_plugin(name):
                raise PluginError(f'another plugin is also called "{name}"; rename one of the entry points')
            declared = made_for()
            if strict and (unsuited := info("ok").unsuited):
                raise PluginError(f"{unsuited}, or leave --strict-plugins out")
            module = importer()
            disagrees = "" if required else other_version(origin, dist, version)
            if strict and disagrees:
                raise PluginError(f"{disagrees}, or leave --strict-plugins out")
            twin = manager.get_name(module)
            if twin is not None:
                raise PluginError(f'it is the same object as plugin "{twin}" ({origin}); leave one entry point out')
            manager.register(module, name=name)
            unknown = _misspelled(manager, name)
            if unknown:
                raise PluginError(unknown)
            hooks = [caller.name for caller in manager.get_hookcallers(manager.get_plugin(name)) or ()]
            components = tuple(_collect(manager, name, dist, version))
            plugins.append(info("ok", components=components, observes=sorted(h for h in hooks if h.startswith("on_"))))
        except (Exception, SystemExit) as error:  # SystemExit: a script without a main guard exits on import
            if manager.get_plugin(name) is not None and not any(p.name == name for p in plugins):
                manager.unregister(name=name)
            place = place_of(error, installed=True)
            text = str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {error}{place}"
            text += _disagreement(origin, error)
            if strict or required:
                raise PluginError(f"plugin {name} ({dist} {version}, {origin}) failed to load: {text}") from error
            log.debug("plugin %s failed to load", name, exc_info=True)
            if outside(declared):
                text += f" (it is made for agentrig{declared}, and this is {outside(declared)})"
            plugins.append(info("failed", error=text, lethal=lethal))

    points = sorted(importlib.metadata.entry_points(group=GROUP), key=lambda e: (e.name != "core", e.name))
    files = list(files)
    places = [(p.name, p.value) for p in points if not {p.name, p.dist.name if p.dist else ""} & blocked]
    places += [(Path(f).stem, str(Path(f))) for f in files if Path(f).stem not in blocked]
    refused = trial.refused(places, retry=retry) if tries else {}
    for point in points:
        dist = point.dist
        add(
            point.name,
            dist.name if dist else "unknown",
            dist.version if dist else "unknown",
            point.value,
            point.load,
            required=False,
            made_for=partial(declared_range, dist) if dist else str,
        )
    for file in files:
        path = Path(file)
        add(path.stem, "file", "-", str(path), lambda path=path: load_file(path), required=True)  # type: ignore[misc]
    return Registry(manager, plugins)
