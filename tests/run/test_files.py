"""Files are written whole or not at all, also on a full disk."""

from __future__ import annotations

import errno
import logging
import os
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

from agentrig.errors import RunFileError
from agentrig.run import files
from agentrig.run.directory import RunDirectory
from agentrig.run.log_file import warnings_kept
from agentrig.text import open_own

FULL = OSError(errno.ENOSPC, "No space left on device")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path / "run")
    run.write("summary.json", "old")

    def full(path: Path) -> None:
        raise FULL

    monkeypatch.setattr(files, "flush", full)
    for write in (lambda: run.write("summary.json", "new"), lambda: run.write_rollouts([], mode="train", step=1)):
        with pytest.raises(RunFileError, match="the disk is full"):
            write()
    assert [f.name for f in run.path.rglob("*") if f.is_file()] == ["summary.json"]
    assert (run.path / "summary.json").read_text() == "old"


def test_a_line_is_appended_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.append_line(tmp_path / "lines", "one")

    def full(descriptor: int) -> None:
        raise FULL

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.append_line(tmp_path / "lines", "two")
    assert (tmp_path / "lines").read_text() == "one\n"


def test_no_file_of_a_run_is_written_through_a_link(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, mine = RunDirectory(tmp_path / "run"), tmp_path / "mine.txt"
    mine.write_text("keep")
    for name in ("metrics.jsonl", ".summary.json.part", "log.jsonl", "server.log", "rollouts/train-00001.part"):
        (run.path / name).symlink_to(mine)
    with pytest.raises(RunFileError, match=r"metrics\.jsonl cannot be written: it is a symbolic link"):
        run.append_metrics({"step": 1})
    run.write("summary.json", "{}")
    run.write_rollouts([], mode="train", step=1)
    with warnings_kept() as kept:
        kept.begin(run.path / "log.jsonl", lambda: 1)
        logging.getLogger("agentrig.test").warning("told")
    with pytest.raises(OSError, match="it is a symbolic link"):
        open_own(run.path / "server.log", os.O_RDWR | os.O_APPEND)
    assert mine.read_text() == "keep"
    assert "log.jsonl cannot be written, so it lacks this run's warnings: it is a symbolic link" in caplog.text
    assert not (run.path / "summary.json").is_symlink()


@pytest.mark.parametrize("broken", [False, True])
def test_what_grows_is_flushed_meanwhile_and_a_broken_disk_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    flushed = threading.Event()
    flush = files.flush

    def counted(path: Path) -> None:
        flush(path)
        flushed.set()
        if broken:
            raise OSError(errno.EIO, "the disk is broken")

    monkeypatch.setattr(files, "flush", counted)
    with pytest.raises(OSError, match="broken") if broken else nullcontext(), files.flushing(tmp_path):
        (tmp_path / "model").write_bytes(b"x" * 1000)
        assert flushed.wait(20)  # before the file is complete
    assert not [t for t in threading.enumerate() if "flushing" in t.name]
