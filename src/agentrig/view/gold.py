"""The private part of a run's tasks, for somebody who reads its traces: no run directory has it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from agentrig.errors import AgentrigError
from agentrig.text import words_of


def gold_of(directory: Path, task: str) -> tuple[Mapping[str, Any], str]:
    """Return a task's private part, and '' or why it cannot be shown; it is empty then."""
    found, why = _load(directory)
    return found.get(task, {}), "" if task in found else why or "the run's task set has no task with this id any more"


@cache
def _load(directory: Path) -> tuple[Mapping[str, Mapping[str, Any]], str]:
    """Load a run's task set, once, and return the private parts of its tasks, and '' or why it cannot be loaded."""
    from agentrig.plan import resolve

    try:
        plan = resolve(str(directory / "config.toml"))
        tasks = plan.build("tasks")
        found = {task.id: dict(task.private) for split in tasks.splits for task in tasks.load(split)}
    except AgentrigError as error:
        return {}, f"the run's task set cannot be loaded here: {str(error).splitlines()[0]}"
    except Exception as error:  # a task set of somebody's plugin may raise anything
        return {}, f"the run's task set cannot be loaded here: {words_of(error)}"
    return found, ""
