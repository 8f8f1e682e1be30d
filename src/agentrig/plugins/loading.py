"""Loading: finds plugins by entry point or file, and isolates broken ones."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import inspect
import logging
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import attrs
import pluggy

from agentrig.errors import PluginError, nearest_path, own_file, place_of
from agentrig.plugins import hookspecs
from agentrig.plugins.building import defined_at
from agentrig.plugins.registry import BLOCK_VARIABLE, Component, PluginInfo, Registry, misspelled
from agentrig.plugins.specs import KINDS, Spec
from agentrig.processes.put_back import put_back, told_if_replaced
from agentrig.text import json_fault, words_of

GROUP = "agentrig"

FIRST = ("core", "lightning")
"""The plugins that come first; `lightning` prepares the import of Agent Lightning, and others may do that import."""

SLOW_S = 30.0
"""Seconds after which a line says, once, where a plugin is that is still loading."""

ENDS_IT = "; Ctrl-C ends it"
"""What such a line says at its end where nothing else helps."""

OWN = re.compile(r"agentrig_(?!file_)")
"""How the modules of agentrig's own plugins begin; other packages don't take these names."""

log = logging.getLogger(__name__)


def load(*, block: Iterable[str] = (), files: Iterable[str | Path] = (), strict: bool = False) -> Registry:
    """Find and load all plugins.

    Args:
        block: Plugin or distribution names that are not imported; `AGENTRIG_BLOCK` adds to them.
        files: Python files that are plugins too (a user's own agent in one file). One that is given twice counts once.
        strict: Raise for the first plugin that fails, instead of continuing.

    Raises:
        PluginError: With `strict`, or when one of `files` cannot be loaded.
    """
    manager = pluggy.PluginManager("agentrig")
    manager.add_hookspecs(hookspecs)
    blocked = {n.strip() for n in (*os.environ.get(BLOCK_VARIABLE, "").split(","), *block) if n.strip()}
    plugins: list[PluginInfo] = []
    for plugin, importer in (*_installed(), *map(_in_file, each_once(files))):
        if plugin.name in blocked or plugin.distribution in blocked:
            plugins.append(attrs.evolve(plugin, status="blocked"))
            continue
        begun, in_file = time.monotonic(), plugin.distribution == "file"
        leave_out = "" if in_file else f"; {BLOCK_VARIABLE}={plugin.name} leaves it out"  # a file is asked for
        try:
            who = f"plugin {plugin.name} ({plugin.origin})"
            own = plugin.distribution.partition("-")[0] == "agentrig"
            watched = nullcontext() if own else told_if_replaced(who)
            with told_if_slow(f"importing {who}", leave_out or ENDS_IT), put_back(who, processes=True), watched:
                plugins.append(_loaded(plugin, importer, manager, plugins))
        except (Exception, SystemExit) as error:  # SystemExit: a script without a main guard exits on import
            text = str(error) if isinstance(error, PluginError) else words_of(error) + place_of(error, installed=True)
            text += f": {error.text.strip()}" if isinstance(error, SyntaxError) and error.text else ""
            text += _disagreement(plugin.origin, error)
            if strict or in_file:
                about = plugin.source if in_file else f"{plugin.source}, {plugin.origin}"
                raise PluginError(f"plugin {plugin.name} ({about}) failed to load: {text}") from error
            log.debug("plugin %s failed to load", plugin.name, exc_info=True)
            plugins.append(attrs.evolve(plugin, status="failed", error=text))
        except KeyboardInterrupt as error:
            where = f"while plugin {plugin.name} was loading{place_of(error, installed=True)}"
            cure = leave_out if time.monotonic() - begun >= SLOW_S else ""
            error.args = (f"{str(error) or 'interrupted'} {where}{cure}",)
            raise
    return Registry(manager, plugins)


@contextmanager
def told_if_slow(what: str, cure: str = ENDS_IT, after_s: float | None = None) -> Iterator[None]:
    """Log that code of a plugin takes long; it goes on.

    After `after_s` a line says how long it has taken. After `SLOW_S` a warning says where it is, but for a plugin of
    agentrig itself, which has another line: there is nothing to mend.
    """
    thread, depth = threading.get_ident(), len(_stack(sys._getframe(2)))

    def tell(seconds: float) -> None:
        place = _place(thread, depth) if seconds >= SLOW_S else ""
        if place:
            log.warning("still %s after %g s, now at %s%s", what, seconds, place, cure)
        else:
            log.info("still %s: %g s%s", what, seconds, cure)

    timers = [threading.Timer(seconds, tell, (seconds,)) for seconds in sorted({after_s or SLOW_S, SLOW_S})]
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
            timer.join()  # a process that forks later has no thread of this one


def _stack(frame: FrameType | None) -> list[tuple[str, int, str]]:
    """Return file, line and module of a frame and of those that called it, the outermost first."""
    found = [
        (each.f_code.co_filename, line, str(each.f_globals.get("__name__")))
        for each, line in traceback.walk_stack(frame)
    ]
    return found[::-1]


def _place(thread: int, depth: int) -> str:
    """Return where a thread is, below so many frames; '' if no code but agentrig's own is at work there."""
    inner = _stack(sys._current_frames().get(thread))[depth:]
    called = [f for f in inner if own_file(f[0], installed=True)][:1]  # its libraries are below it
    users = [f for f in inner if own_file(f[0])]
    if all(OWN.match(module) for _, _, module in [*called, *users]):
        return ""
    return next(f"{file}:{line}" for file, line, _ in reversed(inner) if not file.startswith("<frozen"))


def _installed() -> Iterator[tuple[PluginInfo, Callable[[], Any]]]:
    """Yield the plugins that have an entry point, agentrig's own first, each with the function that imports it."""
    try:
        points = list(importlib.metadata.entry_points(group=GROUP))
    except UnicodeDecodeError:  # one unreadable file of any package fails them all
        points = []
        for each in {d.name: d for d in reversed([*importlib.metadata.distributions()])}.values():  # the first counts
            try:
                points += each.entry_points.select(group=GROUP)
            except UnicodeDecodeError as error:
                wrong = f"its entry_points.txt {json_fault(error)}: reinstall {each.name}, or remove it"
                about = PluginInfo(name=each.name, distribution=each.name, version=each.version, origin=each.name)
                yield about, partial(_refuse, wrong)
    for point in sorted(points, key=lambda point: (point.name not in FIRST, point.name)):
        dist = point.dist
        facts = dist.metadata if dist else {"Name": "unknown", "Version": "unknown"}  # parsed at each access
        yield (
            PluginInfo(name=point.name, distribution=facts["Name"], version=facts["Version"], origin=point.value),
            partial(_load_point, point),
        )


def _refuse(wrong: str) -> Any:
    raise PluginError(wrong)


def _load_point(point: importlib.metadata.EntryPoint) -> Any:
    """Import what an entry point names."""
    if point.pattern.match(point.value) is None:  # `load` would raise an AttributeError of its own
        raise PluginError(f'the entry point "{point.value}" is no module name')
    return point.load()


def each_once(files: Iterable[str | Path]) -> list[str]:
    """Return files without those that are another one of them, however their paths are written."""
    return list({Path(file).expanduser().resolve(): str(file) for file in files}.values())


def _in_file(file: str | Path) -> tuple[PluginInfo, Callable[[], Any]]:
    path = Path(file)
    return PluginInfo(name=path.stem, distribution="file", version="-", origin=str(path)), partial(load_file, path)


def load_file(path: Path) -> ModuleType:
    """Import a Python file as a plugin module; the same file is imported once per process."""
    path = path.expanduser().resolve()
    if not path.is_file():
        known = nearest_path(path)
        absent = f"there is no file {path}{f'.{known}' if known else ''}"
        raise PluginError(f"{path} is no regular file" if path.exists() else absent)
    name = f"agentrig_file_{path.stem}"
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ == str(path):
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PluginError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # for modules beside it; last, so that they do not hide standard modules
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def imported_beside(file: Path) -> list[Path]:
    """Return the Python files in the folder of a plugin file that it imports, at its top or in a function, and theirs.

    They are found in its text, so that it does not matter what else the process has imported, or when. One that is
    imported under a name that is made while the program runs is not found.
    """
    file = file.expanduser().resolve()
    folder, found = file.parent, [file]
    for each in found:
        try:
            nodes = list(ast.walk(ast.parse(each.read_bytes())))
        except (SyntaxError, ValueError):  # the program does not import it, or fails there
            continue
        for node in nodes:
            if isinstance(node, ast.Import):
                base, names = folder, [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = each.parents[node.level - 1] if node.level else folder
                names = [".".join(filter(None, (node.module, alias.name))) for alias in node.names]
            else:
                continue
            for parts in (name.split(".") for name in names):
                if base == folder and parts[0] in sys.stdlib_module_names:
                    continue
                places = [base.joinpath(*parts[: n + 1]) for n in range(len(parts))]
                files = (path for place in places for path in (place.with_suffix(".py"), place / "__init__.py"))
                found += [path for path in files if path not in found and path.is_file()]
    return found[1:]


def _loaded(
    plugin: PluginInfo, importer: Callable[[], Any], manager: pluggy.PluginManager, others: Sequence[PluginInfo]
) -> PluginInfo:
    """Import and register a plugin, and collect its components; one that fails is not registered."""
    if manager.has_plugin(plugin.name):
        raise PluginError(_name_taken(plugin, next(p for p in others if p.name == plugin.name and p.status == "ok")))
    module = importer()
    twin = manager.get_name(module)
    if twin is not None:
        raise PluginError(f'it is the same object as plugin "{twin}" ({plugin.origin}); leave one entry point out')
    try:
        manager.register(module, name=plugin.name)
    except pluggy.PluginValidationError as error:
        raise PluginError(_not_fitting(str(error), manager)) from error
    try:
        if wrong := misspelled(manager, plugin.name):
            raise PluginError(wrong)
        hooks = [caller.name for caller in manager.get_hookcallers(module) or ()]
        observes = sorted(hook for hook in hooks if hook.startswith("on_"))
        return attrs.evolve(plugin, components=_collect(plugin, manager), observes=observes)
    except BaseException:
        manager.unregister(name=plugin.name)
        raise


def _name_taken(plugin: PluginInfo, other: PluginInfo) -> str:
    """Return that a plugin has the name of another one, and what to rename."""
    if plugin.distribution != "file":
        return f'another plugin is also called "{plugin.name}"; rename one of the entry points'
    if other.distribution != "file":
        return f'the plugin of {other.distribution} is also called "{plugin.name}"; rename the file'
    return f'the file {other.origin} is also called "{plugin.name}"; rename one of the files'


def _not_fitting(text: str, manager: pluggy.PluginManager) -> str:
    """Return what is wrong with a hook that pluggy does not take, in plain words if it is its arguments."""
    text = " ".join(text.split())
    found = re.search(r" for hook '(\w+)' hookimpl definition: (.*) Argument\(s\) ", text)
    if found is None:
        return text
    takes = " and ".join(getattr(manager.hook, found[1]).spec.argnames)
    return f"{found[1]} takes {f'only {takes}' if takes else 'no arguments'}; it is defined as {found[2]}"


def _collect(plugin: PluginInfo, manager: pluggy.PluginManager) -> list[Component]:
    """Call the `register_*` hooks of a single plugin, so that its errors do not affect the others."""
    owner = {field: getattr(plugin, field) for field in ("distribution", "version", "origin")}
    found: list[Component] = []
    for kind, cls in KINDS.items():
        for impl in getattr(manager.hook, cls.hook).get_hookimpls():
            if impl.plugin_name != plugin.name:
                continue
            for spec in _specs(impl.function, kind, cls.hook):
                if any(c.kind == kind and c.spec.name == spec.name for c in found):
                    raise PluginError(f'{cls.hook} brings two components called "{spec.name}"; rename one of them')
                found.append(Component(kind=kind, spec=spec, plugin=plugin.name, **owner))
    return found


def _specs(function: Callable[[], Any], kind: str, hook: str) -> list[Spec]:
    """Return the specs that a hook returns.

    Raises:
        PluginError: It is not an iterable of valid specs of this kind; the message says what to write instead.
    """
    wanted = KINDS[kind].__name__
    where = f"{hook}{defined_at(function)}"
    cure = f"write `yield {wanted}(...)`, or `return [{wanted}(...)]`"
    try:
        given = function()
        if inspect.iscoroutine(given):
            given.close()  # else Python warns that nobody awaited it
        several = isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping)
        specs = list(given) if several else None
    except Exception as error:
        place = place_of(error, installed=True)
        raise PluginError(f"{hook if place else where} raised {words_of(error)}{place}") from error
    if specs is None:
        got = f"one {type(given).__name__} by itself" if isinstance(given, Spec) else repr(given)[:80]
        raise PluginError(f"{where} returned {got}; {cure}")
    for spec in specs:
        if not isinstance(spec, KINDS[kind]):
            own = spec.hook if isinstance(spec, Spec) else None
            hint = f"; that belongs into {own}" if own else f"; {cure}"
            got = f"gave a {type(spec).__name__}; it must give {wanted} objects"
            raise PluginError(f"{hook} {got}{hint}{defined_at(function)}")
        if not attrs.has(spec.config):
            raise PluginError(f"{kind} {spec.name}: config must be an attrs class, not {spec.config!r}")
        if not isinstance(spec.summary, str):
            raise PluginError(f"{kind} {spec.name}: summary must be text, not {spec.summary!r:.80}")
        if not callable(getattr(spec, "build", print)):  # a recipe has none
            raise PluginError(f"{kind} {spec.name}: build must be a function that takes the config")
    return specs


def _disagreement(origin: str, error: BaseException) -> str:
    """Return what to do if an entry point names a module, or an object in it, that its package lacks; else ''."""
    module, _, attribute = origin.partition(":")
    lacks = isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}.")
    if lacks or (isinstance(error, AttributeError) and attribute and not place_of(error, installed=True)):
        return f'. The entry point says "{origin}", and the package lacks it: mend one of them, and reinstall it'
    return ""
