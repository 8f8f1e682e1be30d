"""Checks the name of a new component: that it is one, and that nothing has it already."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import keyword
import re
import sys
import unicodedata
from pathlib import Path

from agentrig.errors import ConfigError
from agentrig.plugins.registry import Registry, a_kind
from agentrig.scaffold.templates import DOMAIN, snake

LONGEST = 40
"""Most characters of a name: longer ones make unreadable lines."""

PATTERN = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def check_name(kind: str, name: str, registry: Registry) -> None:
    """Make sure that a component of this kind can have the name.

    Raises:
        ConfigError: It can't: its form, a word of Python's, or something installed has it. The message has a name that
            can be used instead.
    """
    if not PATTERN.fullmatch(name) or len(name) > LONGEST:
        better = spelled(name)
        raise ConfigError(
            f"{name!r} can't be the name of a component: use at most {LONGEST} lower-case letters, digits and single "
            f"hyphens, with a letter first.{f' Write {better}' if better else ''}"
        )
    if name.startswith("agentrig-") or name == "agentrig":
        own = name.removeprefix("agentrig").strip("-")
        raise ConfigError(f'the package is called "agentrig-NAME" anyway: write {own or f"my-{kind}"}')
    if owner := _owner(kind, name, registry):
        raise ConfigError(f'"{name}" is taken: {owner}. Write another name, for example {_free(kind, name, registry)}')


def check_file(file: Path, registry: Registry) -> None:
    """Make sure that a plugin in one file can be this file.

    Raises:
        ConfigError: It can't; the message has a name that can be used instead.
    """
    stem, better = file.stem, f"my_{snake(spelled(file.stem)) or 'plugin'}.py"
    if file.suffix != ".py" or not stem.isidentifier() or keyword.iskeyword(stem):
        raise ConfigError(f"{file} can't be a module of Python. Write for example --here {file.parent / better}")
    if not file.parent.is_dir():
        raise ConfigError(f"there is no folder {file.parent}: make it first, or name a file in another one")
    plugins = (f"a plugin of {p.source} has that name" for p in registry.plugins if p.name == stem)
    owner = _python_owner(stem) or next(plugins, "") or _module_owner(stem)
    if owner:
        raise ConfigError(f"{file} would hide something: {owner}. Write for example --here {file.with_name(better)}")


def spelled(name: str) -> str:
    """Return the nearest name of the right form, or ''."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", plain).lower()
    better = "-".join(re.findall(r"[a-z0-9]+", words)).lstrip("0123456789-")
    return better[:LONGEST].rstrip("-")


def _free(kind: str, name: str, registry: Registry) -> str:
    """Return a name like this one that nothing has."""
    guesses = (f"my-{name}", f"{name}-{kind}", *(f"my-{name}-{i}" for i in range(2, 100)))
    return next((g for g in guesses if len(g) <= LONGEST and not _owner(kind, g, registry)), f"my-{kind}")


def _owner(kind: str, name: str, registry: Registry) -> str:
    """Return what has the name already, or ''."""
    module = snake(name)
    if owner := _python_owner(module):
        return owner
    for each in ("tasks", "agent", "reward", "recipe") if kind == DOMAIN else (kind,):
        for component in registry.components(each):
            if component.spec.name == name:
                return f"{component.source} has {a_kind(each)} of that name"
    for plugin in registry.plugins:
        if plugin.name == name:
            return f"a plugin of {plugin.source} has that name"
    for distribution in (f"agentrig-{name}", name):
        if found := next(iter(importlib.metadata.distributions(name=distribution)), None):
            return f"the distribution {distribution} {found.version} is installed"
    return _module_owner(module) or _module_owner(f"agentrig_{module}")


def _python_owner(module: str) -> str:
    """Return what of Python itself has this name, or ''."""
    if keyword.iskeyword(module) or keyword.issoftkeyword(module):
        return f"`{module}` is a keyword of Python"
    return f"`{module}` is a module of Python's standard library" if module in sys.stdlib_module_names else ""


def _module_owner(module: str) -> str:
    """Return what an installed module of this name is, or ''."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:  # a mere folder has no origin
        return ""
    return f"the module {module} is installed ({spec.origin})"
