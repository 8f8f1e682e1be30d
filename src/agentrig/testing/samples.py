"""Sample tasks: the tasks that an agent or a reward is tried on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import attrs

from agentrig.errors import ConfigError
from agentrig.plugins.registry import a_kind
from agentrig.run.splits import read_split, why_empty
from agentrig.tasks import Task, check_set
from agentrig.testing.kit import CheckFailed, CheckSkipped
from agentrig.testing.subject import Subject


@attrs.define(kw_only=True, eq=False, slots=False)
class TriedSubject(Subject):
    """A component that is tried on tasks.

    Attributes:
        tasks: A list of `Task`; or a task set: its name, `FILE.py:name`, its spec, or itself. None for the only one of
            the component's own plugin.
        tasks_settings: The task set's keys.
        split: Its split; '' for the one that is validated on, else the one that is trained on.
        limit: How many tasks are tried.
        without: The check of the task set that failed, if its tasks cannot be loaded.
    """

    tasks: Any = None
    tasks_settings: Any = None
    split: str = ""
    limit: int = 12
    without: str = ""

    @cached_property
    def task_set(self) -> Subject | None:
        """The task set; None for a list of tasks.

        Raises:
            CheckFailed: No tasks were given, and the component's plugin does not bring exactly one task set.
        """
        if isinstance(self.tasks, Sequence) and not isinstance(self.tasks, str):
            return None
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
        if self.without:
            raise CheckSkipped(f"it needs {self.without}, which failed")
        if self.task_set is None:
            return list(self.tasks[: self.limit])
        made, who = self.task_set.made, f"task set {self.task_set}"
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
    if isinstance(value, dict):
        return [text for item in value.values() for text in texts_of(item)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in texts_of(item)]
    return [] if value is None or isinstance(value, bool) else [str(value)]


def difference(one: Any, other: Any, path: str = "") -> str:
    """Return where two values differ and what each is, or an empty text."""
    if type(one) is type(other) and isinstance(one, list | tuple) and len(one) == len(other):
        parts = (difference(a, b, f"{path}[{i}]") for i, (a, b) in enumerate(zip(one, other, strict=True)))
        return next((p for p in parts if p), "")
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return next((p for k in one if (p := difference(one[k], other[k], f"{path}.{k}"))), "")
    return "" if one == other else f"{path.lstrip('.') or 'it'}: {_short(one)} and {_short(other)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
