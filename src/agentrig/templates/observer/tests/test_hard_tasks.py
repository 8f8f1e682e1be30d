"""Tests what `hard-tasks` does."""

import json
from pathlib import Path

from agentrig_hard_tasks import Config, HardTasks

from agentrig.observers import RunStart, StepEnd
from agentrig.testing.run_directory import rollout_of


def test_the_tasks_that_are_solved_least_often_are_written(tmp_path: Path) -> None:
    observer = HardTasks(Config(n=2))
    observer.on_run_start(RunStart(directory=tmp_path, config={}, steps=1, first_step=1))
    for task, answers in enumerate([(True, True), (False,), (False, True)]):
        for right in answers:
            observer.on_rollout_end(rollout_of(task, right=right, mode="train", step=1))
    observer.on_rollout_end(rollout_of(1, right=True, mode="train", step=1, failure="deadline"))
    observer.on_rollout_end(rollout_of(3, right=False, mode="validation", step=1))
    observer.on_step_end(StepEnd(step=1, metrics={}))
    rows = json.loads((tmp_path / "hard_tasks.json").read_text())
    assert [list(row.values()) for row in rows] == [["task-0001", 0.0, 1], ["task-0002", 0.5, 2]]
