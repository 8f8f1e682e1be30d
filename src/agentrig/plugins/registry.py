"""The registry: looks components up by name and notifies observers."""

from __future__ import annotations

import importlib.metadata
import inspect
import itertools
import logging
import re
import shlex
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import attrs
import pluggy

from agentrig.errors import LookupFailed, PluginError, nearest
from agentrig.plugins import hookspecs
from agentrig.plugins.specs import KINDS, Spec
from agentrig.processes.put_back import put_back

BLOCK_VARIABLE = "AGENTRIG_BLOCK"

FILES = 100
"""Files of the current folder that are searched for a component that no plugin has."""

log = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class Owned:
    """What a distribution or a file brings.

    Attributes:
        distribution: Its name, or `file`.
        version: Its version.
        origin: The module, or the file, that the plugin was loaded from.
    """

    distribution: str
    version: str
    origin: str = ""

    @property
    def source(self) -> str:
        """What brings it, for messages: a distribution and its version, or `file` and its path."""
        return f"{self.distribution} {self.origin if self.distribution == 'file' else self.version}"


@attrs.frozen(kw_only=True)
class Component(Owned):
    """A spec and the plugin that registered it."""

    kind: str
    spec: Spec
    plugin: str

    @property
    def shown(self) -> str:
        """What to give to `agentrig plugins show` to see its keys."""
        file = f" --plugin {shlex.quote(self.origin)}" if self.distribution == "file" else ""
        return f"{self.spec.name}{file}"

    def answers_to(self, name: str) -> bool:
        """Whether `name` means this component: `name`, `distribution:name` or `plugin:name`."""
        owner, qualified, own = name.rpartition(":")
        return own == self.spec.name and (not qualified or owner in (self.distribution, self.plugin))


@attrs.frozen(kw_only=True)
class PluginInfo(Owned):
    """The status of one plugin.

    Attributes:
        name: The entry point's name, or the file's stem; what `AGENTRIG_BLOCK` blocks (so does `distribution`).
        status: `ok`, `failed` (see `error`; other plugins still work) or `blocked` (never imported).
        observes: The hooks `on_*` that it implements itself: every run calls them.
    """

    name: str
    status: Literal["ok", "failed", "blocked"] = "ok"
    error: str | None = None
    components: Sequence[Component] = ()
    observes: Sequence[str] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the entry of `agentrig plugins --json`."""
        names = ("distribution", "version", "name", "status", "origin", "error")
        return {
            **{name: getattr(self, name) for name in names},
            "observes": list(self.observes),
            "components": [{"kind": c.kind, "name": c.spec.name, "summary": c.spec.summary} for c in self.components],
        }


class Registry:
    """All plugins that were found, and their components."""

    def __init__(self, manager: pluggy.PluginManager, plugins: Sequence[PluginInfo]) -> None:
        self._manager = manager
        self.plugins = tuple(plugins)
        self.observer_errors: Counter[str] = Counter()
        self._observers: dict[str, object] = {}

    def components(self, kind: str) -> list[Component]:
        """Return the components of a kind, sorted by name."""
        return sorted((c for p in self.plugins for c in p.components if c.kind == kind), key=lambda c: c.spec.name)

    def find(self, kind: str, name: str) -> Component:
        """Look a component up by `name`, or by `distribution:name` if two plugins have that name.

        Raises:
            PluginError: Two plugins have a component of this kind and name.
            LookupFailed: No loaded plugin has it; the message has the nearest name and the plugins that
                failed to load or are blocked.
        """
        known = self.components(kind)
        hits = [c for c in known if c.answers_to(name)]
        if len(hits) > 1:
            raise PluginError(self._conflict(hits))
        if hits:
            return hits[0]
        names, plain = [self.reference(c) for c in known], [c.spec.name for c in known]
        none = "there are no" if kind == "runners" else "there is no"
        lines = [
            f'{none} {noun_of(kind)} called "{name}".{nearest(name, plain if ":" not in name else names)}',
            f"  {kind} components: {', '.join(names) or 'none'}",
        ]
        if name.endswith(".py"):
            lines.append(f"  A file is a plugin: write --plugin {name}, and --{kind} with the name that it registers")
        elif (files := _unloaded_files(kind, name, {p.origin for p in self.plugins})) or "Did you mean" not in lines[0]:
            files = files or ["FILE.py"]
            lines.append(f"  A file is read only if it is named: add {' or '.join(f'--plugin {f}' for f in files)}")
        for p in self.plugins:
            if p.status == "failed":
                lines.append(f"  plugin {p.name} ({p.source}) failed to load: {p.error}")
            elif p.status == "blocked":
                lines.append(f"  plugin {p.name} ({p.source}) is blocked")
        lines += [f"  {line}" for line in _without_entry_point({p.distribution for p in self.plugins})]
        raise LookupFailed("\n".join(lines))

    def reference(self, component: Component) -> str:
        """Return the shortest name with which `find` finds exactly this component."""
        alike = [c for c in self.components(component.kind) if c.spec.name == component.spec.name]
        for name in (component.spec.name, f"{component.distribution}:{component.spec.name}"):
            if sum(c.answers_to(name) for c in alike) == 1:
                return name
        return f"{component.plugin}:{component.spec.name}"

    def nearby(self, kind: str, name: str, recipe: Component) -> str:
        """Return the name under which `find` finds what a recipe means by `name`: its own package's component first."""
        alike = [c for c in self.components(kind) if c.answers_to(name)]
        own = [c for c in alike if c.plugin == recipe.plugin] or [
            c for c in alike if c.distribution == recipe.distribution
        ]
        return self.reference(own[0]) if len(own) == 1 < len(alike) else name

    def check(self) -> None:
        """Raise `PluginError` if two plugins use the same name; a run checks only the names that it uses."""
        conflicts = []
        for kind in KINDS:
            for _, alike in itertools.groupby(self.components(kind), key=lambda component: component.spec.name):
                hits = list(alike)
                if len(hits) > 1:
                    conflicts.append(self._conflict(hits))
        if conflicts:
            raise PluginError("\n".join(conflicts))

    def _conflict(self, hits: Sequence[Component]) -> str:
        """Return the message for components of one name."""
        kind, plugins, names = hits[0].kind, [c.plugin for c in hits], [self.reference(c) for c in hits]
        say = "agentrig train " if kind == "recipe" else f"--{kind} "
        return (
            f'{"two" if len(hits) == 2 else len(hits)} plugins bring {a_kind(kind)} called "{hits[0].spec.name}": '
            f"{' and '.join(f'{c.plugin} ({c.source})' for c in hits)}.\n"
            f"  Say which: {' or '.join(f'{say}{name}' for name in names)}.\n"
            f"  Or block what you do not want: {' or '.join(f'{BLOCK_VARIABLE}={p}' for p in plugins)} "
            f'(block = ["{plugins[-1]}"] under [run] in a run file).'
        )

    def add_observer(self, observer: object, name: str) -> None:
        """Notify this object with methods `on_*` too; one of the same name goes."""
        self._observers[name] = observer

    def settle(self) -> dict[str, Any]:
        """Let the observers with a method `settle` finish what they do in threads of their own.

        Returns:
            Name to what each returned: counts, for `summary.json`.
        """
        late = {name: watcher.settle for name, watcher in self._observers.items() if hasattr(watcher, "settle")}
        if not late:
            return {}
        found = {}
        with ThreadPoolExecutor(len(late)) as together:
            for name, settled in [(name, together.submit(settle)) for name, settle in late.items()]:
                try:
                    found[name] = settled.result()
                except (Exception, SystemExit):
                    self.observer_errors[name] += 1
                    log.error("observer %s failed in settle", name, exc_info=True)
        return found

    def notify(self, hook: str, **arguments: Any) -> None:
        """Call all observers with read-only copies; an exception is logged and counted, and the run continues."""
        watching: list[tuple[str, Callable[..., Any], Sequence[str]]] = [
            (impl.plugin_name, impl.function, impl.argnames)
            for impl in getattr(self._manager.hook, hook).get_hookimpls()
        ]
        watching += [(n, getattr(w, hook), tuple(arguments)) for n, w in self._observers.items() if hasattr(w, hook)]
        if not watching:
            return
        from agentrig.frozen import frozen  # imported here because every command imports this module

        copies = {name: frozen(value) for name, value in arguments.items()}
        for name, function, argnames in watching:
            try:
                with put_back(f"observer {name}"):
                    function(*(copies[a] for a in argnames))
            except BaseException as error:  # sys.exit in an observer does not end the run either
                own = (
                    isinstance(error, (Exception, SystemExit))
                    or threading.current_thread() is not threading.main_thread()
                )
                if not own:  # Ctrl-C
                    raise
                self.observer_errors[name] += 1
                level = logging.ERROR if self.observer_errors[name] == 1 else logging.DEBUG
                log.log(level, "observer %s failed in %s", name, hook, exc_info=True)


def _unloaded_files(kind: str, name: str, loaded: Collection[str]) -> list[str]:
    """Return up to three files of the current folder that may bring a component: those with its kind and name."""
    found, read = [], {Path(file).resolve() for file in loaded}
    for file in itertools.islice(sorted(Path().glob("*.py")), FILES):
        try:
            text = file.read_text("utf-8", "replace") if file.resolve() not in read and file.is_file() else ""
        except OSError:
            continue
        if "hookimpl" in text and KINDS[kind].hook in text and (f'"{name}"' in text or f"'{name}'" in text):
            found.append(str(file))
    return found[:3]


def _without_entry_point(plugins: Collection[str]) -> Iterator[str]:
    """Yield a line for each installed package that requires agentrig and is no plugin, though its name is not known."""
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name not in plugins and any(
            re.match(r"agentrig(?![\w.-])", line, re.I) for line in distribution.requires or ()
        ):
            yield (
                f"package {name} {distribution.version} requires agentrig, and is no plugin: it has no entry point in "
                'the group "agentrig". Add [project.entry-points.agentrig] to its pyproject.toml, and install it again'
            )


def noun_of(kind: str) -> str:
    """Return what messages call a component of a kind: the kind, but `task set` for `tasks`."""
    return "task set" if kind == "tasks" else kind


def a_kind(kind: str) -> str:
    """Return what messages call one component of a kind, with its article: `an agent`, `a task set`, `runners`."""
    if kind == "runners":
        return kind
    return f"{'an' if kind[0] in 'ao' else 'a'} {noun_of(kind)}"


def misspelled(manager: pluggy.PluginManager, name: str) -> str | None:
    """Return an error message about the hooks of a registered plugin, or None."""
    plugin = manager.get_plugin(name)
    known = [h for h in dir(hookspecs) if h.startswith(("register_", "on_"))]
    callers = manager.get_hookcallers(plugin)
    if unmarked := [hook for hook in known if _is_unmarked(manager, plugin, hook)]:
        file = Path(getattr(plugin, "__file__", None) or name).name
        return f"{file} has {', '.join(unmarked)} without @hookimpl; write `@hookimpl` in the line above"
    if not callers:
        return "it has no hook: is `@hookimpl` missing above a function such as `register_agents`?"
    for caller in callers:
        if not caller.has_spec():
            return f'unknown hook "{caller.name}".{nearest(caller.name, known)} The hooks are: {", ".join(known)}'
    return None


def _is_unmarked(manager: pluggy.PluginManager, plugin: Any, hook: str) -> bool:
    """Whether a plugin defines a function that is named like a hook and has no `@hookimpl`; an imported one is fine."""
    function = inspect.unwrap(getattr(plugin, hook, None))  # type: ignore[arg-type]
    own = inspect.isfunction(function) and function.__module__ == getattr(plugin, "__name__", None)
    return own and manager.parse_hookimpl_opts(plugin, hook) is None
