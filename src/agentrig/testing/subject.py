"""Subjects: the component that is checked, from its name, its file, its spec or itself."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cached_property
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import attrs
import cloudpickle

from agentrig.errors import ConfigError, LookupFailed
from agentrig.plugins import composing
from agentrig.plugins.building import built
from agentrig.plugins.loading import load
from agentrig.plugins.registry import Component, Registry
from agentrig.plugins.specs import KINDS, Spec
from agentrig.settings import structure


@attrs.frozen(kw_only=True, slots=False)
class Subject:
    """A component that is checked; it is found and built when it is first needed.

    Attributes:
        kind: `reward`, `agent` …
        given: The name of an installed component, `FILE.py:name` (or `FILE.py`, if it brings one of this kind), a spec,
            or a component that is already built.
        settings: Its keys, as in a run file; or its config object.
    """

    kind: str
    given: Any
    settings: Any = None

    def __str__(self) -> str:
        """Return the name by which messages call it."""
        if isinstance(self.given, str | Path):
            return str(self.given)
        name = getattr(self.given, "name", None)
        return name if isinstance(name, str) else type(self.given).__name__

    def sendable(self) -> Subject:
        """Return the same subject for another process: its file by its whole path, a spec by value if need be."""
        if self.file is not None:
            name = self._parts[1]
            return attrs.evolve(self, given=f"{self.file.resolve()}{':' if name else ''}{name}")
        by_value(self.given)
        return attrs.evolve(self)

    @property
    def file(self) -> Path | None:
        """The plugin file, if the subject is in one."""
        path = self._parts[0]
        return Path(path) if path else None

    @property
    def _parts(self) -> tuple[str, str]:
        """The file, or '', and the name in it, or ''."""
        if not isinstance(self.given, str | Path):
            return "", ""
        text = str(self.given)
        head, colon, name = text.rpartition(":")
        if colon and head.endswith(".py"):
            return head, name
        return (text, "") if text.endswith(".py") else ("", text)

    @cached_property
    def registry(self) -> Registry:
        """All plugins, with the subject's file."""
        return load(files=[self.file] if self.file else [])

    @cached_property
    def component(self) -> Component | None:
        """The registered component; None if it was given already built.

        Raises:
            agentrig.errors.AgentrigError: There is none of that name, or its file does not load.
        """
        if isinstance(self.given, Spec):
            if self.given.kind != self.kind:
                raise ConfigError(f"{self.given.name} is a {self.given.kind}; this kit checks a {self.kind}")
            return Component(kind=self.kind, spec=self.given, plugin="given", distribution="given", version="-")
        file, name = self._parts
        if name:
            return self.registry.find(self.kind, name)
        if not file:
            return None
        own = [c for c in self.registry.components(self.kind) if c.plugin == Path(file).stem]
        if len(own) != 1:
            known = ", ".join(c.spec.name for c in own) or "none"
            raise LookupFailed(f"{file} brings {len(own)} {self.kind} components ({known}): write {file}:NAME")
        return own[0]

    @property
    def spec(self) -> Any:
        """The spec; None if the component was given already built."""
        return self.component.spec if self.component else None

    @cached_property
    def config(self) -> Any:
        """The checked config object.

        Raises:
            ConfigError: A key is unknown, missing or wrong.
        """
        if self.component is None:
            if self.settings:
                raise ConfigError(f"{self} is already built: settings cannot be changed; give its name or its spec")
            return None
        config = self.component.spec.config
        if isinstance(self.settings, config):
            return self.settings
        keys: Mapping[str, Any] = self.settings or {}
        return structure(config, keys, owner=self.component.spec.name, section=self.kind)

    def build(self) -> Any:
        """Build the component again and return it; one that was given already built is returned unchanged.

        Raises:
            agentrig.errors.AgentrigError: It cannot be found or built; the message names plugin, file and line.
        """
        config = self.config
        if self.component is not None and self.kind == composing.KIND:
            return composing.build(self.component, config, self.registry)[0]
        return self.given if self.component is None else built(self.component, config)

    @cached_property
    def made(self) -> Any:
        """The component, built once and shared by checks."""
        return self.build()


def by_value(given: Any) -> None:
    """Let cloudpickle send the module of a spec's or component's code whole, if no other process can import it."""
    made = getattr(given, "build", given)
    name = getattr(made, "__module__", None) or type(made).__module__
    module = sys.modules.get(name)
    if (
        module is not None
        and PathFinder.find_spec(name.partition(".")[0]) is None
        and name not in sys.builtin_module_names
    ):
        cloudpickle.register_pickle_by_value(module)


def subject_of(kind: str, given: Any, settings: Any = None) -> Subject:
    """Return a subject; it is loaded when a check first needs it.

    Raises:
        ConfigError: There is no such kind.
    """
    if isinstance(given, Subject):
        return given
    if kind not in KINDS:
        raise ConfigError(f'there is no kind "{kind}"; kinds: {", ".join(KINDS)}')
    return Subject(kind=kind, given=given, settings=settings)
