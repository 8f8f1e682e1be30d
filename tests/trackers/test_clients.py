"""Each tracker, by its real client: killed and resumed, and read back by its own reader; see docs/how-to/trackers.md.

TensorBoard is part of `make setup`. The others need `pip install 'agentrig[wandb,mlflow,trackio,swanlab]'`, best in an
environment of their own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tracked_run
import tracker_readers
from quick import quick_first

from agentrig.plugins.builtin import register_observers
from agentrig.trackers.names import of_step, of_summary

NAMES = [own.name for own in register_observers() if own.tracker]
ENDED = {"tensorboard": "finished", "wandb": "0", "mlflow": "FINISHED", "trackio": "", "swanlab": "1"}


def ask(script: str, *words: str, run: Path) -> tuple[int, Any]:
    """Run a script; return its exit status and the JSON that it prints last."""
    env = {**os.environ, "TRACKIO_DIR": str(run.parent / "trackio"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, script, *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, cwd=run.parent)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def play(name: str, run: Path, **how: Any) -> tuple[int, Any]:
    return ask(tracked_run.__file__, json.dumps({"name": name, "directory": str(run), **how}), run=run)


@pytest.mark.parametrize("name", quick_first(NAMES, ("tensorboard",)))
def test_a_killed_and_resumed_run_is_one_run_with_the_runs_figures(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"the client of {name} is not installed: pip install 'agentrig[{name}]'")
    run = tmp_path / "night-1"
    (run / "checkpoints" / "step-00004").mkdir(parents=True)
    (run / "checkpoints" / "step-00004" / "config.json").write_text("{}")
    (run / "config.toml").write_text("[run]\n")
    (run / "manifest.json").write_text('{"config": {}}')

    status, first = play(name, run, part=0, first=1, last=3, ends=False)
    assert status == -signal.SIGKILL
    assert (first["failed"], first["dropped"], first["unsent"]) == (0, 0, 0), first
    kept = json.loads((run / "trackers" / f"{name}.json").read_text())
    assert kept["command"].split()[0] == name
    status, second = play(name, run, part=1, first=3, last=4, ends=True)  # step 3 was lost, and is done again
    assert status == 0
    assert (second["failed"], second["dropped"], second["unsent"]) == (0, 0, 0), second
    assert json.loads((run / "trackers" / f"{name}.json").read_text())["key"] == kept["key"]

    _, (seen,) = ask(tracker_readers.__file__, name, str(run), run=run)
    done = {**dict.fromkeys((1, 2), 0), 3: 0 if name == "swanlab" else 1, 4: 1}  # SwanLab keeps the first of a step
    wanted: dict[str, dict[str, float]] = {}
    for step, part in done.items():
        for figure, value in of_step(tracked_run.line(step, part)).items():
            wanted.setdefault(figure, {})[str(step)] = value
    for figure, value in of_summary(json.loads((run / "summary.json").read_text())).items():
        wanted.setdefault(figure, {})["4"] = value
    assert seen["figures"] == wanted  # every value is exact in 32 bits
    assert wanted["train/reward"]["4"] == 1.5
    assert set(wanted) >= {"algorithm/loss", "nodes/seen/_no_node_", "validation/accuracy", "report/accuracy_after"}
    assert str(seen["config"]["algorithm.lr"]) == "0.25"
    assert "accuracy" in seen["files"]["summary.json"]
    if name != "tensorboard":
        assert seen["files"]["report.html"] == "<p>the report</p>"
        checkpoint = [text for file, text in seen["files"].items() if Path(file).name == "config.json"]
        assert checkpoint == ["{}"] or name == "wandb"  # its artifacts are not among a run's files
    assert ENDED[name] in seen["ended"]
    histograms = {f"train/rewards {step}" for step in (1, 2, 3, 4)} | {"validation/rewards 2"}
    assert set(seen["media"]) == (set() if name == "mlflow" else histograms) | {"validation/samples 2"}
    assert "SECRET" not in json.dumps(seen), "the private part of a task"
    table = seen["media"]["validation/samples 2"]
    if name == "tensorboard":
        assert {seen["media"][each] for each in histograms} == {"3", "2"}  # the first of four failed
        assert table.startswith("[3, 4] task\ninput\nanswer\nreward\ntask")
        assert r"SELECT \| \<b\>6\</b\>" in table
    elif name != "swanlab":
        assert "SELECT | <b>6</b>" in table
        assert "task-4" in table
        assert "task-5" not in table, "the first two by their ids"


def test_every_tracker_has_a_reader_here() -> None:
    assert set(tracker_readers.READERS) == set(NAMES) == set(ENDED)
