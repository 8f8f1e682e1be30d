"""Locks: one holder at a time, which messages name; the file of a dead holder is no lock."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import pytest

from agentrig.errors import ConfigError, RunFileError, RunInUse
from agentrig.plan import Plan
from agentrig.processes.locks import Lock
from agentrig.run.directory import RunDirectory

HOLD = (
    "import sys, pathlib, agentrig.processes.locks as l; "
    "k = l.Lock(pathlib.Path(sys.argv[1])); print(k.take(), flush=True); "
)


def holder(path: Path) -> subprocess.Popen[str]:
    """Start a process that holds a lock until its stdin ends."""
    command = [sys.executable, "-c", HOLD + "sys.stdin.read()", str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "True\n"
    return process


def test_a_living_holder_keeps_others_out_and_a_dead_one_does_not(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with holder(run.path / "run.lock") as process:
        with pytest.raises(RunInUse, match=rf"process {process.pid} on \S+, since \d{{4}}-\d\d-\d\d \d\d:\d\d"):
            run.lock()
        process.send_signal(signal.SIGKILL)
        process.wait()
    run.lock()
    assert f'"pid": {os.getpid()}' in (run.path / "run.lock").read_text()
    with pytest.raises(RunInUse, match=f"process {os.getpid()} on "):
        RunDirectory(run.path).lock()
    run.release()
    RunDirectory(run.path).lock()


def test_a_forked_child_does_not_hold_its_parents_lock(tmp_path: Path) -> None:
    lock = Lock(tmp_path / "lock")
    assert lock.take()
    there, done = os.pipe()
    stay, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(done, b"1")
        os.close(go)
        os.read(stay, 1)
        os._exit(0)
    try:
        os.read(there, 1)
        lock._close()  # as the parent's death does: the child's copy alone could hold the lock now
        assert Lock(tmp_path / "lock").take()
    finally:
        for descriptor in (there, done, stay, go):
            os.close(descriptor)
        os.waitpid(child, 0)


def test_concurrent_callers_get_different_directories(toy_plan: Callable[..., Plan], tmp_path: Path) -> None:
    plan = toy_plan("run.name=''")
    with ThreadPoolExecutor(6) as pool:
        runs = list(pool.map(lambda _: RunDirectory.create(plan), range(6)))
    assert len({run.path for run in runs}) == 6
    assert all(re.fullmatch(r"toy-\d{8}-\d{6}(-[2-6])?", run.path.name) for run in runs)
    assert all((run.path / "config.toml").is_file() for run in runs)


@pytest.mark.parametrize(
    "name", ["..", ".", "../other", "/tmp/x", "a/b", "a\\b", " a", "a\n", ".hidden", "-x", "a\x00b", "x" * 201]
)
def test_a_name_cannot_leave_the_folder_of_runs(toy_plan: Callable[..., Plan], tmp_path: Path, name: str) -> None:
    plan = toy_plan()
    plan = attrs.evolve(plan, run=attrs.evolve(plan.run, name=name))
    with pytest.raises(ConfigError, match=r"run\.name = .* cannot name a run's folder: it "):
        RunDirectory.create(plan)
    assert not list(tmp_path.iterdir())


def test_a_name_that_the_locale_cannot_encode_is_told_with_the_cure(toy_plan: Callable[..., Plan]) -> None:
    name = "gü03".encode().decode("ascii", "surrogateescape")  # as LC_ALL=C gives it
    plan = toy_plan()
    plan = attrs.evolve(plan, run=attrs.evolve(plan.run, name=name))
    with pytest.raises(ConfigError, match=r"the encoding of the locale, \S+, lacks: set LC_ALL=C\.UTF-8"):
        RunDirectory.create(plan)


def test_a_lock_that_is_a_link_is_refused_and_nothing_is_written_through_it(tmp_path: Path) -> None:
    """The run wrote its lock into the file that the link pointed to."""
    (tmp_path / "mine.txt").write_text("keep")
    run = RunDirectory(tmp_path / "run")
    (run.path / "run.lock").symlink_to(tmp_path / "mine.txt")
    with pytest.raises(RunFileError, match=r"run\.lock cannot be written: it is a symbolic link"):
        run.lock()
    assert (tmp_path / "mine.txt").read_text() == "keep"
