"""Damaged files, full disks and impossible folders, over whole runs: which file, what is wrong, what to do."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from changed import change
from click.testing import CliRunner

from agentrig.cli.entry import main
from agentrig.errors import AgentrigError, ConfigError, RunFileError
from agentrig.plan import Plan
from agentrig.run.auditing import Auditing, read_audits
from agentrig.run.damage import reading, writing
from agentrig.run.directory import RunDirectory
from agentrig.run.resume import resume_plan
from agentrig.run.training import train
from agentrig.view.diagnosis import diagnose
from agentrig.view.reading import read_run, warnings_of

pytestmark = pytest.mark.usefixtures("quick_images")

MakePlan = Callable[..., Plan]
SHORT = ("algorithm.steps=1", "algorithm.report=true")


@pytest.fixture
def run(ended_run: Callable[..., Path]) -> Path:
    return ended_run(*SHORT)


def resume(run: Path) -> None:
    train(resume_plan(run, overrides=["algorithm.steps=2"]), resume=run)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("manifest.json", '{"recipe": ', r"manifest\.json is damaged: .*\. Restore it from a copy, or remove it: only"),
        ("manifest.json", '{"components": {"tasks": 1}}', r"manifest\.json is damaged: components is .'tasks': 1"),
        ("manifest.json", "[1]", r"manifest\.json is damaged: it holds a list, not an object"),
        ("summary.json", '{"complete": true, "steps": "x"}', r"summary\.json is damaged: steps is 'x', not a number"),
        ("summary.json", "\x00\x00", r"summary\.json is damaged: .*\. Remove it: the run writes it again when it ends"),
        ("progress.json", "{'a': 1}", r"progress\.json is damaged: .*\. Restore it from a copy, or remove it: the acc"),
        ("config.toml", "[run\n", r"config\.toml is not TOML"),
        ("config.toml", "", r"config\.toml is damaged: it is empty\. Restore it from a copy, for example"),
        ("probe.json", "{}", r"probe\.json cannot be read: it has no 'ids'\. Delete it: the run then"),
        ("rollouts/validation-00001.parquet", "PAR1 no", r"-00001\.parquet is damaged: .*\. Remove it: its rollouts"),
    ],
)
def test_a_damaged_file_is_named_and_nothing_is_changed(run: Path, name: str, text: str, words: str) -> None:
    (run / name).write_text(text)
    before = {f: f.read_bytes() for f in run.rglob("*") if f.is_file() and f.name != "run.lock"}
    with pytest.raises(AgentrigError, match=words) as caught:
        resume(run)
    assert str(run) in str(caught.value)
    assert {f: f.read_bytes() for f in run.rglob("*") if f.is_file() and f.name != "run.lock"} == before
    shown = CliRunner().invoke(main, ["report", str(run)])
    assert shown.exit_code == 0, shown.output  # the page says what it lacks
    if name not in ("progress.json", "probe.json"):  # which nothing can replace; which no page shows
        assert Path(name).name in (run / "report.html").read_text()


@contextmanager
def ending_within(seconds: float) -> Iterator[None]:
    """Raise in this thread if the block takes longer; a system call that waits is interrupted."""

    def late(_signal: int, _frame: object) -> None:
        raise AssertionError(f"it still waits after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


READ_AND_GO_ON = (
    *("error.json", "log.jsonl", "notes.json", "report.html", "plots/reward.png", "audit/verdicts-00001.json"),
)
"""Files without which a run goes on."""


@pytest.mark.parametrize(
    "name",
    [
        "metrics.jsonl",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                *("run.lock", "manifest.json", "config.toml", "progress.json", "summary.json", "checkpoints/latest"),
                *("checkpoints/step-00001", "checkpoints/step-00001/.files.json"),
                *("rollouts", "rollouts/validation-00001.parquet", "calls/train-00001.parquet"),
                *READ_AND_GO_ON,
            )
        ),
    ],
)
def test_no_reader_of_a_run_waits_at_a_pipe(run: Path, tmp_path: Path, name: str) -> None:
    target = run / name
    target.parent.mkdir(exist_ok=True)
    shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
    os.mkfifo(target)
    traces = tmp_path / "traces.jsonl"
    for words in (["why"], ["report"], ["compare"], ["audit"], ["export"], ["export-traces", "--file", str(traces)]):
        given = [*words[:1], str(run), *([str(tmp_path / "model")] if words == ["export"] else words[1:])]
        with ending_within(60):
            done = CliRunner().invoke(main, given)
        assert done.exception is None or isinstance(done.exception, SystemExit), (words, done.exception)
    with ending_within(120):
        if name in (*READ_AND_GO_ON, "checkpoints/latest", "calls/train-00001.parquet"):
            resume(run)
            return
        with pytest.raises(AgentrigError) as caught:
            resume(run)
    told = str(caught.value)
    assert str(target) in told or (name.startswith("checkpoints") and str(target.parent) in told), told
    assert "is missing" not in told, told


def test_a_damaged_record_of_an_audit_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, text in (
        ("verdicts-00001.json", '{"verdicts": ['),
        ("verdicts-00002.json", '{"step": 2, "seconds": 1, "verdicts": [1]}'),
        ("verdicts-00003.json", '{"step": [], "seconds": 1, "verdicts": []}'),
    ):
        (tmp_path / "audit").mkdir(exist_ok=True)
        (tmp_path / "audit" / name).write_text(text)
    auditing = Auditing.__new__(Auditing)
    auditing._run, auditing._said = tmp_path, set()
    assert auditing.summary()["steps"] == auditing.summary()["steps"] == []
    names = ("verdicts-00001.json", "verdicts-00002.json", "verdicts-00003.json")
    assert [caplog.text.count(f"{name} is damaged") for name in names] == [1] * 3
    assert "another type than a run writes. Its verdicts are left out" in caplog.text
    assert [any(name in each for each in read_audits(tmp_path)[1]) for name in names] == [True] * 3


def test_an_edited_setting_is_named_by_why_too(run: Path) -> None:
    assert not any("edited" in each for each in diagnose(run).missing)
    file = run / "config.toml"
    file.write_text(file.read_text().replace("seed = 0", 'seed = "fast"', 1))
    named = [each for each in diagnose(run).missing if "edited" in each]
    assert named == ["config.toml was edited: run.seed is 'fast', and the run had 0"]


def test_every_reader_names_the_line_of_a_configuration_that_is_not_utf8(run: Path, tmp_path: Path) -> None:
    file, other = run / "config.toml", shutil.copytree(run, tmp_path / "other")
    lines = file.read_bytes().split(b"\n")
    file.write_bytes(b"\n".join([*lines[:3], lines[3] + b" # \xff", *lines[4:]]))
    for command in (["train", "--resume"], ["why"], ["report"], ["compare"], ["audit"]):
        more = [str(other)] if command == ["compare"] else []
        said = " ".join(CliRunner().invoke(main, [*command, str(run), *more]).output.split())
        assert re.search(r"config\.toml\S*( is damaged:| cannot be read:)? line 4", said), (command, said)
        assert "Traceback" not in said
    file.write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines))  # as an editor on Windows saves it: nothing is lost
    assert not any("config.toml" in each for each in diagnose(run).missing)


def test_a_damaged_warning_of_a_run_is_not_shown(run: Path) -> None:
    good = {"step": 1, "level": "warning", "text": "slow"}
    lines = [{}, {"step": [], "text": None}, good, {**good, "text": 3}]
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert warnings_of(read_run(run)) == [good]


def test_a_file_in_the_place_of_plots_is_named(run: Path) -> None:
    shutil.rmtree(run / "plots", ignore_errors=True)
    (run / "plots").write_text("")
    done = CliRunner().invoke(main, ["report", str(run)])
    assert done.exit_code == 1
    assert "plots cannot be written: File exists. It can't be created there: move away what is there" in done.output


def test_the_advice_of_the_messages_works(run: Path) -> None:
    for name in ("manifest.json", "summary.json", "error.json"):
        (run / name).write_text("damaged")
        (run / name).unlink()
    (run / "rollouts" / "validation-00001.parquet").unlink()
    (run / "rollouts" / "notes.parquet").write_text("somebody's own")
    change(run, "metrics.jsonl", (0,), lambda line: {"step": line["step"]})  # a line without its figures
    resume(run)
    assert json.loads((run / "summary.json").read_text())["complete"] is True
    assert "need is missing for step 1" in (run / "manifest.json").read_text()
    assert (run / "rollouts" / "notes.parquet").exists()


@pytest.mark.slow
def test_a_lost_record_is_told_for_ever(run: Path) -> None:
    for name in ("progress.json", "manifest.json"):
        (run / name).unlink()
        assert f"{name} is not there" in read_run(run).missing
    for steps in (2, 3):
        train(resume_plan(run, overrides=[f"algorithm.steps={steps}"]), resume=run)
        told = str(diagnose(run))
        assert "progress.json was gone when the run resumed after step 1: the accuracy before" in told
        assert "manifest.json was gone when the run resumed after step 1: the recipe" in told
    assert json.loads((run / "manifest.json").read_text())["recipe"] == ""


def test_a_measurement_that_is_no_number_is_named(run: Path) -> None:
    change(run, "progress.json", ("before", "accuracy"), float("nan"))
    said = "progress.json is damaged: before.accuracy is nan, not a finite number"
    assert said in read_run(run).missing
    assert said in str(diagnose(run))
    with pytest.raises(RunFileError, match=said.removeprefix("progress.json ")):
        resume(run)


def test_a_run_of_a_later_version_is_refused_by_all_readers(run: Path, tmp_path: Path) -> None:
    change(run, "manifest.json", (), lambda facts: facts.update(format=2, agentrig="9.0"))
    step = run / "checkpoints" / "step-00001"
    for words in (
        ["why", run], ["report", run], ["audit", run], ["train", "--resume", run, "algorithm.steps=2"],
        ["export", run, tmp_path / "model"], ["export", step, tmp_path / "model"],
        ["eval", run / "config.toml", "--checkpoint", run], ["dev", run / "config.toml", "--checkpoint", run],
        ["export-traces", run, "--file", tmp_path / "traces"],
    ):  # fmt: skip
        done = CliRunner().invoke(main, [str(word) for word in words])
        said = " ".join(done.output.split())
        assert done.exit_code, words
        assert "was written by agentrig 9.0 in format 2; this version reads formats up to 1" in said, (words, said)
    assert not (tmp_path / "model").exists()


def test_a_full_disk_reported_by_another_library(small_disk: Path) -> None:
    run = RunDirectory(small_disk / "run")

    def write(folder: Path) -> None:
        (folder / "weights").write_bytes(b"x" * (shutil.disk_usage(small_disk).free - 8192))
        raise RuntimeError("PytorchStreamWriter failed writing file data/0")

    with pytest.raises(RunFileError, match="step-00003 cannot be written: the disk is full"):
        run.checkpoints.save(3, write, keep=False)
    with pytest.raises(RuntimeError, match="another reason"), writing(Path("/tmp/x")):
        raise RuntimeError("another reason")


def test_only_the_latest_checkpoint_is_kept_where_the_disk_has_no_room_for_three(small_disk: Path) -> None:
    checkpoints = RunDirectory(small_disk / "run").checkpoints
    half = shutil.disk_usage(small_disk).free * 2 // 5  # two fit at once

    def write(folder: Path) -> None:
        (folder / "weights").write_bytes(b"x" * half)

    for step in (1, 2, 3):
        checkpoints.save(step, write, keep=False)
    assert checkpoints.steps() == [2, 3]
    assert checkpoints.latest() == (checkpoints.path(3), 3)


def test_a_folder_that_was_removed_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFileError) as caught, writing(tmp_path / "runs" / "one" / "metrics.jsonl"):
        (tmp_path / "runs" / "one" / "metrics.jsonl").write_text("")
    assert f"The folder {tmp_path}/runs is gone: something has removed it since the run started" in str(caught.value)
    assert "No folder can be created" not in str(caught.value)


@pytest.mark.parametrize(
    "place", ["/proc/runs", "/dev/null", "/dev/null/runs", "/sys/kernel/runs", "{tmp}/" + "x" * 300]
)
def test_unusable_folders(toy_plan: MakePlan, tmp_path: Path, place: str) -> None:
    folder = place.replace("{tmp}", str(tmp_path))
    with pytest.raises((RunFileError, ConfigError), match=r"cannot be written: .*run\.directory=DIR"):
        train(toy_plan(*SHORT, f"run.directory={folder}"))


def test_a_read_only_file_system(toy_plan: MakePlan, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(RunFileError, match=r"cannot be written: Read-only file system\. Get write permission"):
        train(toy_plan(*SHORT, f"run.directory={small_disk}"))


def test_a_missing_file_is_left_to_the_caller(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), reading(tmp_path / "nothing"):
        (tmp_path / "nothing").read_text()
    with pytest.raises(RunFileError, match="cannot be read: Is a directory"), reading(tmp_path):
        tmp_path.read_text()


def test_the_cure_belongs_to_what_was_asked(run: Path, small_disk: Path) -> None:
    shutil.copytree(run, small_disk / "run", symlinks=True)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(RunFileError, match=r"run\.lock cannot be written: Read-only file system") as caught:
        resume(small_disk / "run")
    assert "run.directory" not in str(caught.value)
    shown = CliRunner().invoke(main, ["report", str(small_disk / "run")])
    assert "report.html cannot be written: Read-only file system" in shown.output
    assert "choose another place: --out FILE" in shown.output
