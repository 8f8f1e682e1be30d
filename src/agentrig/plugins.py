"""The plugin system: finds plugins by entry point, isolates broken ones, looks components up by name."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar, cast

import attrs
import pluggy

from agentrig import hookspecs
from agentrig.building import defined_at
from agentrig.errors import LookupFailed, PluginError, nearest, place_of
from agentrig.lightning_import import open_door
from agentrig.specs import KINDS, Spec

GROUP = "agentrig"
BLOCK_VARIABLE = "AGENTRIG_BLOCK"

log = logging.getLogger(__name__)
S = TypeVar("S", bound=Spec)

REGISTER_HOOKS = {
    "tasks": "register_tasks",
    "agent": "register_agents",
    "reward": "register_rewards",
    "adapter": "register_adapters",
    "algorithm": "register_algorithms",
    "hardware": "register_hardware",
    "recipe": "register_recipes",
}


@attrs.frozen(kw_only=True)
class Component:
    """A spec and the plugin that brought it."""

    kind: str
    spec: Spec
    plugin: str
    distribution: str
    version: str

    def answers_to(self, name: str) -> bool:
        """Whether `name` asks for this: its own name, alone or as `distribution:name` or `plugin:name`."""
        owner, qualified, own = name.rpartition(":")
        return own == self.spec.name and (not qualified or owner in (self.distribution, self.plugin))


@attrs.frozen(kw_only=True)
class PluginInfo:
    """What became of one plugin.

    Attributes:
        name: The entry point's name, or the file's stem; what `AGENTRIG_BLOCK` blocks (so does `distribution`).
        status: `ok`, `failed` (see `error`; the others go on without it) or `blocked` (never imported).
        origin: The module, or the file, that it was loaded from.
    """

    name: str
    distribution: str
    version: str
    status: Literal["ok", "failed", "blocked"]
    origin: str
    error: str | None = None
    components: Sequence[Component] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the entry of `agentrig plugins --json`."""
        return {
            "distribution": self.distribution,
            "version": self.version,
            "name": self.name,
            "status": self.status,
            "origin": self.origin,
            "error": self.error,
            "components": [{"kind": c.kind, "name": c.spec.name, "summary": c.spec.summary} for c in self.components],
        }


class Registry:
    """All plugins that were found, and the components they brought."""

    def __init__(self, manager: pluggy.PluginManager, plugins: Sequence[PluginInfo]) -> None:
        self._manager = manager
        self.plugins = tuple(plugins)
        self.observer_errors: Counter[str] = Counter()

    def components(self, kind: str) -> list[Component]:
        """Return the components of a kind, sorted by name."""
        return sorted((c for p in self.plugins for c in p.components if c.kind == kind), key=lambda c: c.spec.name)

    def find(self, kind: str, name: str) -> Component:
        """Look a component up by `name`, or by `distribution:name` where two plugins bring that name.

        Raises:
            PluginError: Two plugins bring a component of this kind and name.
            LookupFailed: No loaded plugin brings it; the message has the nearest name and names the
                plugins that failed to load or are blocked.
        """
        known = self.components(kind)
        hits = [c for c in known if c.answers_to(name)]
        if len(hits) > 1:
            raise PluginError(_conflict(hits))
        if hits:
            return hits[0]
        names, plain = [self.reference(c) for c in known], [c.spec.name for c in known]
        lines = [
            f'there is no {kind} called "{name}".{nearest(name, plain if ":" not in name else names)}',
            f"  {kind} components: {', '.join(names) or 'none'}",
        ]
        for p in self.plugins:
            if p.status == "failed":
                lines.append(f"  plugin {p.name} ({p.distribution} {p.version}) failed to load: {p.error}")
            elif p.status == "blocked":
                lines.append(f"  plugin {p.name} ({p.distribution} {p.version}) is blocked")
        raise LookupFailed("\n".join(lines))

    def reference(self, component: Component) -> str:
        """Return the shortest name by which `find` finds this component alone."""
        alike = [c for c in self.components(component.kind) if c.spec.name == component.spec.name]
        for name in (component.spec.name, f"{component.distribution}:{component.spec.name}"):
            if sum(c.answers_to(name) for c in alike) == 1:
                return name
        return f"{component.plugin}:{component.spec.name}"

    def get(self, kind: type[S], name: str) -> S:
        """Return the spec of that class and name; see `find` for the errors."""
        return cast(S, self.find(kind.kind, name).spec)

    def check(self) -> None:
        """Raise `PluginError` if two plugins claim one name; a run needs this only of the names that it asks for."""
        conflicts = []
        for kind in KINDS:
            counts = Counter(c.spec.name for c in self.components(kind))
            for name, count in counts.items():
                if count > 1:
                    conflicts.append(_conflict([c for c in self.components(kind) if c.spec.name == name]))
        if conflicts:
            raise PluginError("\n".join(conflicts))

    def add_observer(self, observer: object, name: str) -> None:
        """Let an object with `on_*` hook implementations watch the run."""
        self._manager.register(observer, name=name)
        unknown = _misspelled(self._manager, name)
        if unknown:
            self._manager.unregister(name=name)
            raise PluginError(f"observer {name}: {unknown}")

    def notify(self, hook: str, **arguments: Any) -> None:
        """Tell all observers, by read-only copies; one that raises is logged and counted, and stops nothing."""
        watching = getattr(self._manager.hook, hook).get_hookimpls()
        if not watching:
            return
        from agentrig.frozen import frozen  # here: it knows rollouts, and every command imports this module

        copies = {name: frozen(value) for name, value in arguments.items()}
        for impl in watching:
            try:
                impl.function(*(copies[a] for a in impl.argnames))
            except Exception:
                self.observer_errors[impl.plugin_name] += 1
                level = logging.ERROR if self.observer_errors[impl.plugin_name] == 1 else logging.DEBUG
                log.log(level, "observer %s failed in %s", impl.plugin_name, hook, exc_info=True)


def _conflict(hits: Sequence[Component]) -> str:
    first, second = hits[0], hits[1]
    owner = first.distribution if first.distribution != second.distribution else first.plugin
    say = f"agentrig train {owner}:" if first.kind == "recipe" else f"--{first.kind} {owner}:"
    return (
        f'two plugins bring a {first.kind} called "{first.spec.name}": {first.plugin} ({first.distribution} '
        f"{first.version}) and {second.plugin} ({second.distribution} {second.version}).\n"
        f"  Say which: {say}{first.spec.name}. Or block one of them: {BLOCK_VARIABLE}={second.plugin}, or "
        f'block = ["{second.plugin}"] under [run] in a run file.'
    )


def _misspelled(manager: pluggy.PluginManager, name: str) -> str | None:
    """Return what is wrong with the hooks of a registered plugin, or None."""
    plugin = manager.get_plugin(name)
    known = [h for h in dir(hookspecs) if h.startswith(("register_", "on_"))]
    callers = manager.get_hookcallers(plugin)
    if not callers:
        return "it has no hook: is `@hookimpl` missing above a function such as `register_agents`?"
    for caller in callers:
        if not caller.has_spec():
            return f'unknown hook "{caller.name}".{nearest(caller.name, known)} The hooks are: {", ".join(known)}'
    return None


def _collect(manager: pluggy.PluginManager, name: str, distribution: str, version: str) -> list[Component]:
    """Call the `register_*` hooks of one plugin alone, so that it cannot harm the others."""
    found: list[Component] = []
    for kind, hook in REGISTER_HOOKS.items():
        for impl in getattr(manager.hook, hook).get_hookimpls():
            if impl.plugin_name != name:
                continue
            for spec in _specs(impl.function, kind, hook):
                if any(c.kind == kind and c.spec.name == spec.name for c in found):
                    raise PluginError(f'{hook} brings two components called "{spec.name}"; rename one of them')
                found.append(Component(kind=kind, spec=spec, plugin=name, distribution=distribution, version=version))
    return found


def _specs(function: Callable[[], Any], kind: str, hook: str) -> list[Spec]:
    """Return what a hook gives.

    Raises:
        PluginError: It is not an iterable of sound specs of this kind; says what to write instead.
    """
    wanted = KINDS[kind].__name__
    where = f"{hook}{defined_at(function)}"
    cure = f"write `yield {wanted}(...)`, or `return [{wanted}(...)]`"
    try:
        given = function()
        several = isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping)
        specs = list(given) if several else None
    except Exception as error:
        place = place_of(error)
        raise PluginError(f"{hook if place else where} raised {type(error).__name__}: {error}{place}") from error
    if specs is None:
        got = f"one {type(given).__name__} by itself" if isinstance(given, Spec) else repr(given)[:80]
        raise PluginError(f"{where} returned {got}; {cure}")
    for spec in specs:
        if not isinstance(spec, KINDS[kind]):
            own = REGISTER_HOOKS.get(spec.kind) if isinstance(spec, Spec) else None
            hint = f"; that belongs into {own}" if own else f"; {cure}"
            got = f"gave a {type(spec).__name__}; it must give {wanted} objects"
            raise PluginError(f"{hook} {got}{hint}{defined_at(function)}")
        if not attrs.has(spec.config):
            raise PluginError(f"{kind} {spec.name}: config must be an attrs class, not {spec.config!r}")
        if not callable(getattr(spec, "build", print)):  # a recipe has none
            raise PluginError(f"{kind} {spec.name}: build must be a function that takes the config")
    return specs


def blocked_names(block: Iterable[str] = ()) -> set[str]:
    """Return the names to block: those given and those of the variable `AGENTRIG_BLOCK`."""
    return {n.strip() for n in (*os.environ.get(BLOCK_VARIABLE, "").split(","), *block) if n.strip()}


def load(*, block: Iterable[str] = (), files: Iterable[str | Path] = (), strict: bool = False) -> Registry:
    """Find and load all plugins.

    Args:
        block: Plugin or distribution names that must not even be imported; `AGENTRIG_BLOCK` adds to them.
        files: Python files that are plugins too (a user's own agent in one file).
        strict: Raise for the first plugin that fails instead of going on without it.

    Raises:
        PluginError: With `strict`, or when one of `files` cannot be loaded.
    """
    open_door()  # a plugin may import Agent Lightning at its top
    manager = pluggy.PluginManager("agentrig")
    manager.add_hookspecs(hookspecs)
    blocked = blocked_names(block)
    plugins: list[PluginInfo] = []

    def add(name: str, dist: str, version: str, origin: str, importer: Callable[[], Any], *, required: bool) -> None:
        def info(status: Literal["ok", "failed", "blocked"], **more: Any) -> PluginInfo:
            return PluginInfo(name=name, distribution=dist, version=version, status=status, origin=origin, **more)

        if name in blocked or dist in blocked:
            plugins.append(info("blocked"))
            return
        try:
            if manager.has_plugin(name):
                raise PluginError(f'another plugin is called "{name}" too; rename one of the entry points')
            manager.register(importer(), name=name)
            unknown = _misspelled(manager, name)
            if unknown:
                raise PluginError(unknown)
            plugins.append(info("ok", components=tuple(_collect(manager, name, dist, version))))
        except (Exception, SystemExit) as error:  # a script without a main guard ends itself at import
            if manager.get_plugin(name) is not None and not any(p.name == name for p in plugins):
                manager.unregister(name=name)
            text = str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {error}{place_of(error)}"
            if strict or required:
                raise PluginError(f"plugin {name} ({dist} {version}, {origin}) failed to load: {text}") from error
            log.debug("plugin %s failed to load", name, exc_info=True)
            plugins.append(info("failed", error=text))

    for point in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda e: (e.name != "core", e.name)):
        dist = point.dist
        add(
            point.name,
            dist.name if dist else "unknown",
            dist.version if dist else "unknown",
            point.value,
            point.load,
            required=False,
        )
    for file in files:
        path = Path(file)
        add(path.stem, "file", "-", str(path), lambda path=path: load_file(path), required=True)  # type: ignore[misc]
    return Registry(manager, plugins)


def load_file(path: Path) -> ModuleType:
    """Import a Python file as a plugin module; the same file is imported once a process.

    Raises:
        PluginError: There is no such file.
    """
    path = path.expanduser().resolve()
    if not path.is_file():
        raise PluginError(f"there is no file {path}")
    name = f"agentrig_file_{path.stem}"
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ == str(path):
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PluginError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # modules beside it; last, so that they hide none of Python's
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
