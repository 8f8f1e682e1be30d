"""Subjects: the component that is checked, from its name, its file, its spec or itself."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cached_property
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, ClassVar, Self

import attrs
import cloudpickle

from agentrig.errors import ConfigError, LookupFailed
from agentrig.plugins import composing
from agentrig.plugins.building import built
from agentrig.plugins.loading import load
from agentrig.plugins.registry import BLOCK_VARIABLE, Component, Registry
from agentrig.plugins.specs import Spec
from agentrig.settings import structure


@attrs.define(kw_only=True, eq=False, slots=False)
class Subject:
    """A component that is checked, found and built when it is first needed, and what its checks share.

    The class of a kind, `RewardSubject` and so on, adds the options of its checks as fields.

    Attributes:
        kind: `reward`, `agent` …
        given: The name of an installed component, `FILE.py:name` (or `FILE.py`, if it brings one of this kind), a spec,
            or a component that is already built.
        settings: Its keys, as in a run file; or its config object.
    """

    builds: ClassVar[bool] = True
    """Whether the check `loads` builds the component."""

    kind: str
    given: Any
    settings: Any = None
    done: dict[Any, Exception | str] = attrs.field(factory=dict, init=False, repr=False)
    chosen: set[Any] = attrs.field(factory=set, init=False, repr=False)
    opened: ExitStack = attrs.field(factory=ExitStack, init=False, repr=False)

    def __str__(self) -> str:
        """Return the name by which messages call it."""
        if isinstance(self.given, str | Path):
            return str(self.given)
        name = getattr(self.given, "name", None)
        return name if isinstance(name, str) else type(self.given).__name__

    def sendable(self) -> Self:
        """Return the same subject, without options, for another process: its file by its whole path."""
        file, name = self._parts
        given = f"{Path(file).resolve()}{name and f':{name}'}" if file else self.given
        if not file:
            _send_by_value(given)
        return type(self)(kind=self.kind, given=given, settings=self.settings)

    @property
    def file(self) -> Path | None:
        """The plugin file, if the subject is in one."""
        return Path(self._parts[0]) if self._parts[0] else None

    @property
    def _parts(self) -> tuple[str, str]:
        """The file, or '', and the name in it, or ''."""
        if not isinstance(self.given, str | Path):
            return "", ""
        head, colon, name = str(self.given).rpartition(":")
        if colon and head.endswith(".py"):
            return head, name
        return (str(self.given), "") if str(self.given).endswith(".py") else ("", str(self.given))

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

    @cached_property
    def folder(self) -> Path:
        """A folder for the checks, which goes at the end."""
        folder = Path(tempfile.mkdtemp(prefix="agentrig-kit-"))
        self.opened.callback(shutil.rmtree, folder, ignore_errors=True)
        return folder

    @property
    def registered(self) -> bool:
        """Whether other processes can find it by a name."""
        return self.component is not None and self.component.plugin != "given"

    @property
    def blocking(self) -> dict[str, str]:
        """The variable with which another process loads no other plugin than the component's own."""
        own = {"core", self.component.plugin if self.component else ""}
        return {BLOCK_VARIABLE: ",".join(p.name for p in self.registry.plugins if p.name not in own)}

    def close(self) -> None:
        """End what the checks have started."""
        self.opened.close()


def _send_by_value(given: Any) -> None:
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
