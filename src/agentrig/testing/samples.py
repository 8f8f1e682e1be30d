"""Sample tasks: the tasks that an agent or a reward is tried on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrig.errors import ConfigError
from agentrig.run.splits import check_set, read_split
from agentrig.tasks import Task
from agentrig.testing.checks import CheckFailed
from agentrig.testing.subject import Subject, subject_of

TASKS_N = 12
"""How many tasks a component is tried on by default."""


def some_tasks(given: Any, *, subject: Subject, settings: Any = None, split: str = "", n: int = TASKS_N) -> list[Task]:
    """Return the first tasks of a split.

    Args:
        given: A list of `Task`; or a task set: its name, `FILE.py:name`, its spec, or itself. None for the only task
            set of the subject's own plugin.
        subject: The component that is tried.
        settings: The task set's keys.
        split: The split's name; '' for the one that is validated on, else the one that is trained on.
        n: How many.

    Raises:
        CheckFailed: No tasks were given, and the subject's plugin does not bring exactly one task set.
        ConfigError: The split has no tasks.
        agentrig.errors.AgentrigError: They cannot be loaded.
    """
    if isinstance(given, Sequence) and not isinstance(given, str):
        return list(given[:n])
    tasks = task_set_of(given, subject=subject, settings=settings)
    made = tasks.made
    who = f"task set {tasks}"
    check_set(made, who)
    name = split or made.roles.get("validation") or made.roles.get("train") or made.splits[0]
    found = list(read_split(made, name, who=who)[:n])
    if not found:
        raise ConfigError(f'{who}: the split "{name}" has no tasks; give another: split=NAME')
    return found


def task_set_of(given: Any, *, subject: Subject, settings: Any = None) -> Subject:
    """Return the task set that `some_tasks` takes tasks from."""
    return subject_of("tasks", _own(subject) if given is None else given, settings)


def _own(subject: Subject) -> Any:
    """Return the spec of the only task set of the subject's plugin."""
    component = subject.component
    known = subject.registry.components("tasks") if component and component.plugin != "given" else []
    own = [c.spec for c in known if component and c.plugin == component.plugin]
    if len(own) != 1:
        brought = ", ".join(spec.name for spec in own) or "no task set"
        names = ", ".join(sorted({c.spec.name for c in subject.registry.components("tasks")})) or "none"
        raise CheckFailed(
            f"it is not known with which tasks to try it: its plugin brings {brought}",
            cure=f'Name a task set: `agentrig validate NAME --tasks TASKS`; in a test `tasks="TASKS"`, '
            f'`tasks="FILE.py:NAME"` or a list of agentrig.Task. Installed: {names}.',
            why=f"The checks of {'an' if subject.kind == 'agent' else 'a'} {subject.kind} play it on a few tasks.",
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
