"""The observer `hard-tasks`: writes which tasks the agent solved least often while it was trained."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import attrs

from agentrig import ObserverSpec, hookimpl, setting
from agentrig.observers import RunStart, StepEnd
from agentrig.rollouts import Rollout


@attrs.frozen(kw_only=True)
class Config:
    """The settings: `[observer.hard-tasks]` of a run file."""

    n: int = setting(20, help="how many tasks are written", ge=1)
    file: str = setting("hard_tasks.json", help="the file, in the run directory")


class HardTasks:
    """What `build` returns. The run waits for each method, and what it gets is a read-only copy."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._directory = Path()
        self._correct: dict[str, list[bool]] = defaultdict(list)

    def on_run_start(self, event: RunStart) -> None:
        """Remember where to write."""
        self._directory = Path(event.directory)

    def on_rollout_end(self, rollout: Rollout) -> None:
        """Count a training rollout; a failure says nothing about its task."""
        if rollout.mode == "train" and rollout.correct is not None:
            self._correct[rollout.task.id].append(bool(rollout.correct))

    def on_step_end(self, event: StepEnd) -> None:
        """Write the file again, so that it is there while the run goes on."""
        shares = {task: sum(seen) / len(seen) for task, seen in self._correct.items()}
        hardest = sorted(shares, key=lambda task: (shares[task], task))[: self._config.n]
        rows = [{"task": t, "correct": shares[t], "rollouts": len(self._correct[t])} for t in hardest]
        (self._directory / self._config.file).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


@hookimpl
def register_observers() -> Iterable[ObserverSpec]:
    """Register `hard-tasks`."""
    yield ObserverSpec(
        name="hard-tasks", summary="Writes which tasks were solved least often.", config=Config, build=HardTasks
    )
