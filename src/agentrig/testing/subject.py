"""What is checked: the component, from its name, its file, its spec or itself; and how a check of it ends."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
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
from agentrig.plugins.registry import BLOCK_VARIABLE, Component, Registry, a_kind
from agentrig.plugins.specs import Spec
from agentrig.run.splits import read_split, why_empty
from agentrig.settings import structure
from agentrig.tasks import Task, check_set
from agentrig.text import cut


class CheckFailed(AssertionError):
    """A component lacks a property that training needs.

    Args:
        what: What was seen, and where.
        cure: What to do about it, if it is not the check's own cure.
        why: What goes wrong in training, if it is not the check's own reason.
        check: The check's name; `Check` adds it.
    """

    def __init__(self, what: str, cure: str = "", why: str = "", check: str = "") -> None:
        super().__init__(what, cure, why, check)
        self.what, self.cure, self.why, self.check = what, cure, why, check

    def __str__(self) -> str:
        parts = [f"{self.check}: {self.what}" if self.check else self.what]
        parts += [f"  why it matters: {self.why}"] if self.why else []
        parts += [f"  what to do: {self.cure}"] if self.cure else []
        return "\n".join(parts)


class CheckSkipped(Exception):
    """A check does not apply here; the message says why. Under pytest it is a skipped test."""


def refuse(faults: Mapping[str, bool]) -> None:
    """Fail, and name those faults that there are."""
    if found := [fault for fault, there in faults.items() if there]:
        raise CheckFailed("; ".join(found))


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
        given = str(self.given) if isinstance(self.given, str | Path) else ""
        file, _, name = given.rpartition(":") if not given.endswith(".py") else (given, "", "")
        return (file, name) if file.endswith(".py") else ("", given)

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

    @property
    def failed(self) -> CheckFailed | None:
        """The first check that was done and failed."""
        return next((found for found in self.done.values() if isinstance(found, CheckFailed)), None)

    def close(self) -> None:
        """End what the checks have started."""
        self.opened.close()


def _send_by_value(given: Any) -> None:
    """Let cloudpickle send the module of a spec's or component's code whole, if no other process can import it."""
    made = getattr(given, "build", given)
    name = getattr(made, "__module__", None) or type(made).__module__
    importable = name in sys.builtin_module_names or PathFinder.find_spec(name.partition(".")[0]) is not None
    if name in sys.modules and not importable:
        cloudpickle.register_pickle_by_value(sys.modules[name])


@attrs.define(kw_only=True, eq=False, slots=False)
class TriedSubject(Subject):
    """A component that is tried on tasks.

    Attributes:
        tasks: A list of `Task`; or a task set: its name, `FILE.py:name`, its spec, itself, or a `Subject` of it. None
            for the only one of the component's own plugin.
        tasks_settings: The task set's keys.
        split: Its split; '' for the one that is validated on, else the one that is trained on.
        limit: How many tasks are tried.
    """

    tasks: Any = None
    tasks_settings: Any = None
    split: str = ""
    limit: int = 12

    @cached_property
    def task_set(self) -> Subject | None:
        """The task set; None for a list of tasks.

        Raises:
            CheckFailed: No tasks were given, and the component's plugin does not bring exactly one task set.
        """
        if isinstance(self.tasks, Sequence) and not isinstance(self.tasks, str):
            return None
        if isinstance(self.tasks, Subject):
            return self.tasks
        given = self._own_tasks() if self.tasks is None else self.tasks
        return Subject(kind="tasks", given=given, settings=self.tasks_settings)

    @property
    def split_name(self) -> str:
        """The split that they are from; '' for a list of tasks."""
        if self.task_set is None:
            return ""
        made = self.task_set.made
        return str(self.split or made.roles.get("validation") or made.roles.get("train") or made.splits[0])

    @cached_property
    def rows(self) -> list[Task]:
        """The first tasks of the split.

        Raises:
            ConfigError: The split has no tasks.
            CheckSkipped: They cannot be loaded, and a check of the task set has said so.
        """
        if self.task_set is None:
            return list(self.tasks[: self.limit])
        try:
            return self._loaded(self.task_set)
        except Exception:
            if failed := self.task_set.failed:
                raise CheckSkipped(f"it needs {failed.check}, which failed") from None
            raise

    def _loaded(self, task_set: Subject) -> list[Task]:
        made, who = task_set.made, f"task set {task_set}"
        check_set(made, who)
        name = self.split_name
        found = list(read_split(made, name, who=who)[: self.limit])
        if not found:
            cure = why_empty(made, name) or "give another: split=NAME"
            raise ConfigError(f'{who}: the split "{name}" has no tasks; {cure}')
        return found

    def _own_tasks(self) -> Any:
        component, known = self.component, self.registry.components("tasks") if self.registered else []
        own = [c.spec for c in known if component and c.plugin == component.plugin]
        if len(own) != 1:
            brought = ", ".join(spec.name for spec in own) or "no task set"
            names = ", ".join(sorted({c.spec.name for c in self.registry.components("tasks")})) or "none"
            raise CheckFailed(
                f"it is not known with which tasks to try it: its plugin brings {brought}",
                cure=f'Name a task set: `agentrig validate NAME --tasks TASKS`; in a test `tasks="TASKS"`, '
                f'`tasks="FILE.py:NAME"` or a list of agentrig.Task. Installed: {names}.',
                why=f"The checks of {a_kind(self.kind)} play it on a few tasks.",
            )
        return own[0]


def texts_of(value: Any) -> list[str]:
    """Return all texts and numbers in a JSON value, as text."""
    if isinstance(value, dict | list | tuple):
        return [text for item in (value.values() if isinstance(value, dict) else value) for text in texts_of(item)]
    return [] if value is None or isinstance(value, bool) else [str(value)]


def difference(one: Any, other: Any, path: str = "") -> str:
    """Return where two values differ and what each is, or an empty text."""
    if type(one) is type(other) and isinstance(one, list | tuple) and len(one) == len(other):
        parts = (difference(a, b, f"{path}[{i}]") for i, (a, b) in enumerate(zip(one, other, strict=True)))
        return next((p for p in parts if p), "")
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return next((p for k in one if (p := difference(one[k], other[k], f"{path}.{k}"))), "")
    return "" if one == other else f"{path.lstrip('.') or 'it'}: {cut(repr(one), 80)} and {cut(repr(other), 80)}"
