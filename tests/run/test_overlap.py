"""A run with `max_staleness = 1`: killed while rollouts and update overlap, resumed, interrupted, audited."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from audited_runs import PLUGIN, USES
from click.testing import CliRunner

from agentrig.cli import main
from agentrig.plan import Plan, resolve
from agentrig.processes.ends import Interrupted
from agentrig.run.resume import resume_plan
from agentrig.run.training import train

pytestmark = pytest.mark.slow  # two runs; tests/run/test_session.py lets rollouts run ahead in the default run

NOTES = """
import json
import threading
import time
from pathlib import Path

HERE = Path(__file__).parent


def note(*what):
    with (HERE / "told").open("a") as file:
        file.write(json.dumps([threading.current_thread().name, *what]) + "\\n")


@hookimpl
def on_rollout_end(rollout):
    note("rollout", rollout.mode, rollout.step, rollout.version)
    order = HERE / f"signal-{rollout.mode}-{rollout.step}"
    if order.exists():
        saved, end = HERE / "run" / "checkpoints" / f"step-{rollout.step - 2:05d}", time.monotonic() + 60
        while not saved.exists() and time.monotonic() < end:  # it is written while the next step runs
            time.sleep(0.01)
        number = int(order.read_text())
        order.unlink()
        os.kill(os.getpid(), number)


@hookimpl
def on_step_end(event):
    note("step", "", event.step, None)
"""

SETTINGS = (
    "adapter.match=speak", "algorithm.model=mini", "algorithm.tasks_per_step=3", "algorithm.group_size=4",
    "algorithm.steps=9", "algorithm.max_staleness=1", "algorithm.max_tokens=8", "algorithm.temperature=1.5",
    "algorithm.lr=2e-4", "algorithm.warmup_steps=0", "algorithm.validate_every=2", "algorithm.keep_every=1",
    "algorithm.ppo_epochs=2", "algorithm.mini_batches=2", "hardware.threads=1", "runners.n=1", "run.report_tasks=1",
    "run.validation_tasks=2",
)  # fmt: skip


def plan_in(folder: Path) -> Plan:
    own = [f"run.directory={folder}", "run.name=run"]
    file = str(folder / "speaker.py")
    return resolve(None, overrides=[*own, *SETTINGS], uses=USES, files=[file])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Killed in step 3 while rollouts of step 4 ran; resumed; interrupted in step 4 while those of step 5 ran."""
    folder = tmp_path_factory.mktemp("overlap")
    (folder / "speaker.py").write_text(PLUGIN + NOTES)
    (folder / "signal-train-4").write_text(str(int(signal.SIGKILL)))
    words = [sys.executable, __file__, str(folder)]
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "support")}
    done = subprocess.run(words, env=path, capture_output=True, text=True, timeout=280)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    with (folder / "told").open("a") as file:
        file.write('["", "killed", "", 0, null]\n')
    (folder / "signal-train-5").write_text(str(int(signal.SIGINT)))
    with pytest.raises(Interrupted):
        train(resume_plan(folder / "run"), resume=folder / "run")
    return folder / "run"


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]


def versions_of(run: Path, mode: str, step: int) -> set[int]:
    return set(pq.read_table(run / "rollouts" / f"{mode}-{step:05d}.parquet").column("version").to_pylist())


def told(run: Path) -> list[tuple[str, str, str, int, int | None]]:
    return [tuple(json.loads(text)) for text in (run.parent / "told").read_text().splitlines()]


def test_rollouts_are_at_most_one_version_behind_and_say_so(run: Path) -> None:
    lines = lines_of(run)
    assert [line["step"] for line in lines] == [1, 2, 3, 4], (
        "the killed step was repeated, the interrupted one finished"
    )
    assert [line["max_staleness"] for line in lines] == [0, 1, 0, 1], "the first step after a start is fresh"
    assert [versions_of(run, "train", step) for step in (1, 2, 3, 4)] == [{0}, {0}, {2}, {2}]
    assert [versions_of(run, "validation", step) for step in (2, 4)] == [{2}, {4}], "of the weights that were just made"
    assert lines[0]["algorithm"]["rollout_is_max"] == pytest.approx(1.0, abs=1e-3)
    for line in (lines[1], lines[3]):
        assert line["algorithm"]["rollout_is_max"] > 1.001
        assert line["overlap_s"] >= 0
        assert sum(line["time_s"].values()) <= line["step_s"] * 1.01, "no second counts twice"
    assert "overlap_s" not in lines[0]
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["max_staleness"], summary["complete"]) == (1, False)
    assert any("max_staleness = 1" in note for note in summary["notes"])


def test_rollouts_run_while_the_step_before_is_learned(run: Path) -> None:
    """With max_staleness = 1 a batch begins before the step before ends, and ends before its weights are served."""
    events = told(run)
    for step in (2, 4):
        (end,) = (i for i, event in enumerate(events) if event[1:4] == ("step", "", step - 1))
        batch = [i for i, event in enumerate(events) if event[1:4] == ("rollout", "train", step)][-12:]
        assert len(batch) == 12
        assert max(batch) < end
        assert {events[i][0] for i in batch} == {"rollouts"}
    (killed,) = (i for i, event in enumerate(events) if event[1] == "killed")
    again = [event for event in events[killed:] if event[1:4] == ("rollout", "train", 3)]
    assert {event[0] for event in again} == {"algorithm"}, "after the resume, step 3 begins with rollouts of its own"
    assert len(again) == 12


def test_the_proofs_hold_with_stale_rollouts(run: Path) -> None:
    lines = lines_of(run)
    for line in lines:
        books = line["calls"]
        assert books["recorded"] == 12 == books["trained"] + sum(books["dropped"].values())
        assert line["delivery"]["arrived"] == line["delivery"]["proofs"] > 0
        gap, bound = line["delivery"]["calls_difference"], line["delivery"]["calls_bound"]
        assert gap is None if line["max_staleness"] else gap < bound, "only fresh calls are the learner's"


@pytest.mark.parametrize("step", [2, 4])
def test_a_stale_step_holds_in_every_link_that_can_be_looked_at(run: Path, step: int) -> None:
    done = CliRunner().invoke(main, ["audit", str(run), "--step", str(step), "--json"])
    assert done.exit_code == 0, done.output
    found = {each["link"]: each["result"] for each in json.loads(done.stdout)[0]["verdicts"]}
    looked = {"tasks", "text", "distribution", "score", "advantages", "delivery"}
    assert {link for link, result in found.items() if result == "ok"} >= looked, found


def test_the_report_says_it(run: Path) -> None:
    page = (run / "report.html").read_text()
    assert "rollouts of 2 of 4 steps were sampled by weights one version behind" in page


if __name__ == "__main__":  # a process of its own, to be killed
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    train(plan_in(Path(sys.argv[1])))
