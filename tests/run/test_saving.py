"""When a run saves, and its checkpoints that are written while the next step runs."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrig.errors import ConfigError, RunFileError
from agentrig.plan import Plan, resolve
from agentrig.run import saving
from agentrig.run.checkpoints import Checkpoints, verify
from agentrig.run.resume import resume_plan
from agentrig.run.saving import Saving, check_room, is_due
from agentrig.run.training import train
from agentrig.testing.tiny_model import make_tiny_model

SUPPORT = Path(__file__).resolve().parents[1] / "support"
LARGE = 21_000_000_000

STEPS: Mapping[str, tuple[dict[str, Any], bool]] = {
    "nothing was saved yet": ({"waited_s": None}, True),
    "it costs 5%": ({"since_s": 20.0, "waited_s": 1.0}, True),
    "it costs more": ({"since_s": 19.0, "waited_s": 1.0}, False),
    "the last write is under way": ({"since_s": 100.0, "waited_s": 0.1, "busy": True}, False),
    "steps beside its write were slower": ({"since_s": 126.0, "waited_s": 0.1, "write_s": 25.0}, False),
    "5%, these steps counted": ({"since_s": 127.0, "waited_s": 0.1, "write_s": 25.0}, True),
    "ten minutes would be lost": ({"since_s": 598.0, "step_s": 2.5, "waited_s": 60.0}, True),
    "they would not yet": ({"since_s": 597.0, "step_s": 2.5, "waited_s": 60.0}, False),
    "with the write they would": ({"since_s": 580.0, "step_s": 2.5, "waited_s": 60.0, "write_s": 18.0}, True),
    "ten minutes, while the last write is under way": ({"since_s": 600.0, "waited_s": 60.0, "busy": True}, True),
    "a step takes ten minutes": ({"since_s": 601.0, "step_s": 601.0, "waited_s": 90.0}, True),
    "a small model": ({"since_s": 0.1, "step_s": 0.1, "waited_s": 0.09, "size": 12_000_000}, True),
    "a small model, its write under way": ({"since_s": 0.1, "waited_s": 0.09, "size": 12_000_000, "busy": True}, True),
    "a small model on a slow disk": ({"since_s": 2.0, "waited_s": 1.5, "size": 12_000_000}, False),
    "a model that does not say its size": ({"since_s": 0.1, "waited_s": 0.09, "size": 0}, False),
}


@pytest.mark.parametrize("case", STEPS)
def test_auto_saves_as_often_as_it_costs_little(case: str) -> None:
    given, expected = STEPS[case]
    usual = {"since_s": 1.0, "step_s": 1.0, "write_s": 0.0, "busy": False, "size": LARGE}
    assert is_due(**{**usual, **given}) is expected


def test_one_write_is_under_way_at_most_and_an_error_ends_what_comes_next() -> None:
    held, wrote = threading.Event(), []

    def copy(name: str, write: Callable[[], Any]) -> Callable[[], Callable[[], Any]]:
        def copied() -> Callable[[], Any]:
            wrote.append(f"{name} copied")
            return write

        return copied

    def slow() -> None:
        assert held.wait(20)
        wrote.append("one written")

    with Saving(1) as each:
        each.save(copy("one", slow))
        each.check()  # it does not wait
        assert wrote == ["one copied"]
        threading.Timer(0.1, held.set).start()
        each.save(copy("two", lambda: wrote.append("two written")))
        assert wrote[:3] == ["one copied", "one written", "two copied"]
    assert wrote[3:] == ["two written"]
    assert each.waited()["checkpoint"] >= 0.05
    assert each.waited() == {}

    def full() -> None:
        raise RunFileError("the disk is full")

    failing = Saving(1)
    failing.save(copy("three", full))
    with pytest.raises(RunFileError, match="full"):
        failing.settle()
    failing.settle()  # it is raised once
    failing.save(copy("four", full))
    with pytest.raises(RunFileError, match="full"), failing:
        pass


def test_the_end_by_an_error_waits_too_and_keeps_that_error(caplog: pytest.LogCaptureFixture) -> None:
    wrote: list[str] = []

    def write() -> None:
        wrote.append("written")
        raise RunFileError("the disk is full")

    def body(each: Saving) -> None:
        with each:
            each.save(lambda: write)
            raise ValueError("diverged")

    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match="diverged"):
        body(Saving("auto"))
    assert wrote == ["written"]
    assert "the disk is full" in caplog.text


def test_a_number_of_steps_is_kept_whatever_it_costs() -> None:
    each = Saving(3)
    assert [step for step in range(1, 10) if each.due(step)] == [3, 6, 9]


def test_a_disk_without_room_is_named_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)

    def free(size: float) -> None:
        usage = type("Usage", (), {"free": size})
        monkeypatch.setattr(saving.shutil, "disk_usage", lambda path: usage)

    free(20e9)
    with pytest.raises(
        ConfigError, match=r"has about 21\.0 GB, and .*checkpoints has 20\.0 GB free: not even one fits"
    ):
        check_room(folder, size=LARGE, writes=100, kept=0)
    with pytest.raises(ConfigError, match=r"fits\. Free some space, or move the run directory to another disk$"):
        check_room(folder, size=LARGE, writes=100, kept=0, resumed=True)
    caplog.set_level(logging.WARNING)
    free(41e9)
    check_room(folder, size=LARGE, writes=100, kept=0)
    assert "2 checkpoints of about 21.0 GB will be on the disk at once: 42.0 GB, and" in caplog.text
    caplog.clear()
    check_room(folder, size=LARGE, writes=1, kept=0)  # a short run writes fewer
    free(43e9)
    check_room(folder, size=LARGE, writes=100, kept=0)
    assert caplog.text == ""
    check_room(folder, size=LARGE, writes=100, kept=10)
    assert "12 checkpoints" in caplog.text
    assert "10 of which algorithm.keep_every keeps" in caplog.text
    caplog.clear()
    (folder / "step-00004").mkdir()  # its place is used again
    free(22e9)
    check_room(folder, size=LARGE, writes=100, kept=0)
    assert caplog.text == ""


# --- whole runs -----------------------------------------------------------------------------------

PLANT = """
import os, signal, threading, time
from pathlib import Path
from agentrig import hookimpl

@hookimpl
def on_run_start(event):
    if "SAVING_TOLD" not in os.environ:  # the resumed run
        return
    from agentrig_grpo import trainer_files
    from agentrig_grpo.learner import Learner

    begun, write, update = {}, trainer_files.write, Learner.update
    told = Path(os.environ["SAVING_TOLD"]).open("a", buffering=1)

    def updated(self, samples, *, step, sketch=None):
        found = update(self, samples, step=step, sketch=sketch)
        told.write(f"{threading.current_thread().name} update {step}\\n")
        begun.setdefault(step, threading.Event()).set()
        return found

    def written(directory, state):
        if not directory.name.startswith(".step-00002"):
            write(directory, state)
            return
        told.write(f"{threading.current_thread().name} writes 2\\n")
        assert begun.setdefault(3, threading.Event()).wait(60)
        write(directory, state)
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    Learner.update, trainer_files.write = updated, written
"""
KINDS = {
    "all weights": ["algorithm.ppo_epochs=2", "algorithm.mini_batches=2"],
    "adapters": ["algorithm.lora_rank=4"],
    "a reference": ["algorithm.kl_loss_coef=0.05"],
    "the best weights": ["algorithm.final=best", "algorithm.validate_every=1", "run.validation_tasks=4"],
    "stale rollouts": ["algorithm.max_staleness=1"],
}


def plan_in(folder: Path, name: str, *more: str, files: Sequence[Path] = ()) -> Plan:
    """A run that repeats itself: one runner, one thread."""
    words = [
        f"run.directory={folder}", f"run.name={name}", f"algorithm.model={folder / 'model'}", "algorithm.steps=4",
        "algorithm.tasks_per_step=3", "algorithm.group_size=4", 'algorithm.save_every="auto"', "run.report_tasks=2",
        "runners.threads=1", "hardware.threads=1", "server.threads=1", "run.audit=false", *more,
    ]  # fmt: skip
    return resolve("letters", overrides=words, files=[str(SUPPORT / "letters_plugin.py"), *map(str, files)])


def killed(folder: Path, name: str, *more: str) -> list[str]:
    """Train in a process of its own, which its planted writer kills; return what it told."""
    told = folder / "told"
    (folder / "plant.py").write_text(PLANT)
    environment = {**os.environ, "SAVING_TOLD": str(told), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(folder), name, *more]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    return told.read_text().splitlines()


def learned(run: Path) -> list[tuple[int, str, float]]:
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["digests"]["weights"], line["reward"]) for line in lines]


def files_of(run: Path) -> dict[str, bytes]:
    folder = run / "checkpoints" / "step-00004"
    there = [*folder.glob("*.safetensors"), *folder.glob("adapter_config.json"), folder / "trainer" / "state.json"]
    return {file.name: file.read_bytes() for file in there}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_kill_while_a_checkpoint_is_written_costs_only_that_one(tmp_path: Path, kind: str) -> None:
    """Step 2 is being written when step 3 was learned; the resumed run equals the one that was not killed."""
    make_tiny_model(tmp_path / "model")
    words = KINDS[kind]
    if kind == "stale rollouts":  # a resumed run begins with fresh rollouts: compare with one resumed at the same step
        train(plan_in(tmp_path, "whole", *words, "algorithm.steps=1"))
        train(resume_plan(tmp_path / "whole", overrides=["algorithm.steps=4"]), resume=tmp_path / "whole")
    else:
        train(plan_in(tmp_path, "whole", *words))
    assert killed(tmp_path, "killed", *words)[-2:] == ["checkpoint writes 2", "algorithm update 3"]
    run = tmp_path / "killed"
    there = Checkpoints(run / "checkpoints")
    assert (there.steps(), (run / "checkpoints" / "latest").read_text()) == ([1], "step-00001")
    verify(there.path(1))
    assert [step for step, *_ in learned(run)] in ([1, 2], [1, 2, 3])
    train(resume_plan(run), resume=run)
    whole = tmp_path / "whole"
    assert learned(run) == learned(whole)
    if kind != "stale rollouts":
        assert files_of(run) == files_of(whole)
    assert not list((run / "checkpoints").glob(".*"))


if __name__ == "__main__":  # a process of its own, with the planted writer
    place = Path(sys.argv[1])
    train(plan_in(place, *sys.argv[2:], files=[place / "plant.py"]))
