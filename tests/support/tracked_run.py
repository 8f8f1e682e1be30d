"""Plays a part of a run to a tracker, in a process of its own that may be killed: `python tracked_run.py JSON`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Literal

from agentrig import Outcome, Score, Task, Trace
from agentrig.observers import RunEnd, RunStart, StepEnd
from agentrig.plugins.builtin import register_observers
from agentrig.rollouts import Rollout

PROJECT = "agentrig-tests"


def line(step: int, part: int) -> dict[str, object]:
    """Return a line of metrics; a step that is done again has another reward."""
    return {
        "step": step,
        "time": 1_800_000_000.0 + step,
        "reward": step / 8 + part,
        "accuracy": None,
        "failures": {"deadline": step},
        "algorithm": {"loss": 1.0 / 2**step, "actor/entropy": float("nan")},
        "nodes": {"seen": {"(no node)": 3}},
        "validation_accuracy": 0.5 if step == 2 else None,
    }


def rollout(i: int, mode: Literal["train", "validation"], step: int) -> Rollout:
    """Return a rollout; the first of four failed."""
    outcome = Outcome(failure="deadline") if i % 4 == 0 else Outcome(answer=f"=SELECT | <b>{i}</b>")
    score = None if outcome.failure else Score(status="ok", value=i / 4)
    task = Task(id=f"task-{9 - i}", input={"question": f"How many {i}?"}, private={"gold": "SECRET"})
    trace = Trace(rollout_id=f"{mode}-{i}", spans=())
    return Rollout(
        id=f"{mode}-{i}", task=task, group="g", mode=mode, step=step, outcome=outcome, score=score, trace=trace
    )


def main(name: str, directory: str, part: int, first: int, last: int, ends: bool) -> None:
    """Play the steps; then end the run, or be killed."""
    run = Path(directory)
    (own,) = [own for own in register_observers() if own.name == name]
    keys = {"tags": ["nightly"], "flush_s": 120.0, "figures": "all", "samples": 2}
    keys |= {"project": PROJECT} if name != "tensorboard" else {}
    keys |= {"offline": True} if name in ("wandb", "mlflow", "swanlab") else {}
    tracker = own.build(own.config(**keys))
    config = {"run": {"name": "r"}, "algorithm": {"lr": 0.25, "betas": [0.9, 0.99]}}
    tracker.on_run_start(RunStart(directory=run, config=config, steps=last, first_step=first))
    for step in range(first, last + 1):
        for i, mode in enumerate(["train"] * 4 + ["validation"] * 3 * (step == 2)):
            tracker.on_rollout_end(rollout(i, mode, step))
        tracker.on_step_end(StepEnd(step=step, metrics=line(step, part)))
    if not ends:
        settled = tracker.settle()
        time.sleep(0.0 if name in ("tensorboard", "mlflow") else 3.0)  # the others write in threads of their own
        print(json.dumps(settled), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    summary = {"accuracy": {"before": 0.25, "after": 0.75, "n": 8}, "steps": last, "wall_s": 9.0, "rollouts": 40}
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "report.html").write_text("<p>the report</p>")
    tracker.on_run_end(RunEnd(directory=run, summary=summary))
    print(json.dumps(tracker.settle()), flush=True)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
