"""The private part of a run's tasks, for somebody who reads its traces: no run directory has it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrig.errors import AgentrigError
from agentrig.text import words_of


class Gold:
    """Loads the task sets of runs, once for each run, when somebody opens a trace."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[Path, tuple[Mapping[str, Mapping[str, Any]], str]] = {}

    def of(self, directory: Path, task: str) -> tuple[Mapping[str, Any] | None, str]:
        """Return a task's private part, and '' or why it cannot be shown."""
        with self._lock:
            if directory not in self._known:
                self._known[directory] = _load(directory)
            found, why = self._known[directory]
        if task in found:
            return found[task], ""
        return None, why or "the run's task set has no task with this id any more"


def _load(directory: Path) -> tuple[Mapping[str, Mapping[str, Any]], str]:
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
