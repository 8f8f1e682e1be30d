"""Tests what `hard-tasks` does."""

import json
from pathlib import Path

from agentrig_hard_tasks import Config, HardTasks

from agentrig import Outcome, Score, Task, Trace
from agentrig.observers import RunStart, StepEnd
from agentrig.rollouts import Rollout


def rollout(task: str, *, value: float | None, mode: str = "train") -> Rollout:
    score = Score.invalid("the database is gone") if value is None else Score.ok(value)
    return Rollout(
        id=f"{task}-{value}",
        task=Task(id=task, input={}),
        group=task,
        mode=mode,  # type: ignore[arg-type]
        step=1,
        outcome=Outcome(answer=""),
        score=score,
        trace=Trace(rollout_id="r"),
    )


def test_the_tasks_that_are_solved_least_often_are_written(tmp_path: Path) -> None:
    observer = HardTasks(Config(n=2))
    observer.on_run_start(RunStart(directory=tmp_path, config={}, steps=1, first_step=1))
    for task, values in {"easy": (1.0, 1.0), "hard": (0.0, None), "half": (0.0, 1.0)}.items():
        for value in values:
            observer.on_rollout_end(rollout(task, value=value))
    observer.on_rollout_end(rollout("other", value=0.0, mode="validation"))
    observer.on_step_end(StepEnd(step=1, metrics={}))
    rows = json.loads((tmp_path / "hard_tasks.json").read_text())
    assert [(row["task"], row["correct"], row["rollouts"]) for row in rows] == [("hard", 0.0, 1), ("half", 0.5, 2)]
