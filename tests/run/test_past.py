"""Resuming: losses are reported, a failed start changes nothing, damage names the previous checkpoint."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from changed import Place, change
from click.testing import CliRunner
from model_server import ModelServer

from agentrig.cli.entry import main
from agentrig.cli.options import find_checkpoint
from agentrig.errors import AgentrigError, CheckpointDamaged, ConfigError, RunFileError, RunInUse
from agentrig.run import checkpoints, files
from agentrig.run.directory import RunDirectory
from agentrig.run.past import contradictions, over_common, read_past, recorded_in
from agentrig.run.resume import recorded_plan, resume_plan
from agentrig.run.training import train
from agentrig.view import build_report
from agentrig.view.causes.evidence import Evidence
from agentrig.view.causes.outcome import go_on
from agentrig.view.comparison import compare
from agentrig.view.diagnosis import diagnose, words
from agentrig.view.page import view
from agentrig.view.reading import columns_of, read_run
from agentrig.view.watch.runs import Run

pytestmark = pytest.mark.usefixtures("quick_images")


@pytest.fixture
def finished(ended_run: Callable[..., Path]) -> Path:
    """A finished run of three steps; the last two have a checkpoint."""
    return ended_run("algorithm.steps=3", "run.validation_tasks=1")


def content(run: Path) -> dict[str, bytes]:
    """Every file except the lock, which names the last process that took it."""
    return {str(f.relative_to(run)): f.read_bytes() for f in run.rglob("*") if f.is_file() and f.name != "run.lock"}


def steps_of(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["agent.use=toy-broken", "algorithm.steps=4"], "the agent toy-broken cannot be built"),
        (["algorithm.steps=1", "run.seed=2"], "has 3 steps already, and is to have 1 in all"),
        (["run.report=tst", "algorithm.steps=4"], 'there is no split "tst"'),
        (["reward.use=own", "algorithm.steps=4"], "has the reward toy-parity, and reward.use=own names another one"),
        (["tasks.use=mini-sql", "algorithm.steps=4"], "has the task set toy-tasks, and tasks.use=mini-sql names"),
    ],
)
def test_a_resume_that_fails_changes_nothing(finished: Path, overrides: Sequence[str], said: str) -> None:
    before = content(finished)
    with pytest.raises(AgentrigError, match=said):
        train(resume_plan(finished, overrides=overrides, from_step=3), resume=finished)
    assert content(finished) == before
    assert json.loads(before["summary.json"])["accuracy"]["after"] == 0.5


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('use = "toy-parity"', 'use = "own"', r"config\.toml was edited: it names the reward own, and .* toy-parity"),
        ('use = "toy-tasks"', 'use = "mini-sql"', r"config\.toml was edited: it names the task set mini-sql, and"),
        ("seed = 0", "seed = -1", r"'seed' must be >= 0[\s\S]*The settings are in .*toy/config\.toml"),
        ("[run]", None, r"config\.toml is missing\. Restore it from a copy, for example from the section config of"),
    ],
)
def test_settings_edited_by_hand_are_refused_with_their_file(
    finished: Path, old: str, new: str | None, said: str
) -> None:
    file = finished / "config.toml"
    text = file.read_text()
    assert old in text
    if new is None:
        file.unlink()
    else:
        file.write_text(text.replace(old, new))
    before = content(finished)
    with pytest.raises(ConfigError, match=said):
        resume_plan(finished, overrides=["algorithm.steps=4"])
    with pytest.raises(ConfigError, match=said) as told:
        recorded_plan(finished)  # of `audit`, which has no --resume
    assert "--resume" not in str(told.value)
    assert content(finished) == before


@pytest.mark.slow
def test_other_settings_edited_by_hand_are_named_once(finished: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = finished / "config.toml"
    file.write_text(file.read_text().replace("validation_tasks = ", "validation_tasks = 1"))
    for expected in (1, 0):
        caplog.clear()
        train(resume_plan(finished, overrides=[f"algorithm.steps={5 - expected}"]), resume=finished)
        said = [r.getMessage() for r in caplog.records if "was edited" in r.getMessage()]
        assert len(said) == expected
        assert all("run.validation_tasks is 1" in one and "That holds from now on" in one for one in said)


def newest_gone(run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "step-00003")


def newest_and_its_name_gone(run: Path) -> None:
    newest_gone(run)
    (run / "checkpoints" / "latest").unlink()


def killed_while_saving(run: Path) -> None:
    newest = run / "checkpoints" / "step-00003"
    newest.rename(newest.with_name(".step-00003.part"))
    (run / "checkpoints" / "latest").write_text("step-00002")


def killed_while_removing(run: Path) -> None:
    """The state within a resume with --from-step."""
    newest = run / "checkpoints" / "step-00003"
    newest.rename(newest.with_name(".step-00003.gone"))


def latest_elsewhere(run: Path) -> None:
    (run / "checkpoints" / "latest").write_text("../../other/checkpoints/step-00003")


def latest_names_nothing(run: Path) -> None:
    (run / "checkpoints" / "latest").write_text("")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (latest_elsewhere, "latest names '../../other/checkpoints/step-00003', which is no checkpoint of this run: "),
        (latest_names_nothing, "latest names '', which is no checkpoint of this run: step-00003 is used, the newest"),
        (killed_while_removing, "step-00003 is not there, though the run saved it: step-00002 is used"),
        (newest_gone, "checkpoints/step-00003 is not there, though the run saved it: step-00002 is used"),
        (newest_and_its_name_gone, "checkpoints/step-00003 is not there, though the run saved it: step-00002 is used"),
        (killed_while_saving, ""),
    ],
)
def test_a_newest_checkpoint_that_is_gone_is_told(
    finished: Path, damage: Callable[[Path], None], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    damage(finished)
    find_checkpoint(finished)  # of `eval`, `dev` and `export`
    told = capfd.readouterr().err
    assert told.count("\n") <= 1
    run = RunDirectory(finished)
    run.lock()
    warnings = [text for text in read_past(run).warnings if "checkpoint" in text and "had none" not in text]
    run.release()
    shown = [text for text in read_run(finished).missing if "checkpoint" in text]  # of `why`, `report` and `watch`
    assert said in told
    assert not said or any(said in text for text in shown), shown
    assert bool(said) == bool(told) == bool(warnings) == bool(shown), (told, warnings)


def test_checkpoints_that_changed_places_are_named(finished: Path) -> None:
    folder = finished / "checkpoints"
    (folder / "step-00003").rename(folder / "three")
    (folder / "step-00002").rename(folder / "step-00003")
    (folder / "three").rename(folder / "step-00002")
    with pytest.raises(CheckpointDamaged) as raised:
        read_past(RunDirectory(finished))
    assert "step-00003 is damaged: it is what the run saved as step-00002 (progress.json): give" in str(raised.value)
    assert "progress.json is damaged" not in str(raised.value)
    assert "No earlier checkpoint" not in str(raised.value), "to restore a file, or to start again, mends nothing here"


@pytest.mark.parametrize("name", ["checkpoints", "rollouts"])
def test_a_folder_that_is_immutable_is_named_with_its_cure(finished: Path, name: str) -> None:
    if subprocess.run(["chattr", "+i", finished / name], capture_output=True).returncode:
        pytest.skip("chattr needs root, and a file system that has it")
    try:
        with pytest.raises(
            RunFileError, match=rf"{name} cannot be written: Operation not permitted\. .* undo chattr \+i"
        ):
            read_past(RunDirectory(finished))
    finally:
        subprocess.run(["chattr", "-i", finished / name], check=True)
    assert read_past(RunDirectory(finished)).step == 3


def killed_before_latest(run: Path) -> None:
    """The state between the two renames at the end of a save."""
    (run / "checkpoints" / "latest").write_text("step-00002")
    (run / "summary.json").unlink()


def test_a_checkpoint_that_was_complete_at_a_kill_is_used(finished: Path) -> None:
    killed_before_latest(finished)
    past = read_past(RunDirectory(finished))
    assert (past.step, past.warnings) == (3, [])


def test_a_crash_while_a_resume_removes_later_steps_leaves_a_run_to_resume(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = checkpoints.Checkpoints._remove

    def killed(there: checkpoints.Checkpoints, step: int) -> None:
        remove(there, step)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.Checkpoints, "_remove", killed)
        with pytest.raises(KeyboardInterrupt):
            RunDirectory(finished).rewind(0)
    assert (steps_of(finished), (finished / "summary.json").exists()) == ([1, 2, 3], False)
    past = read_past(RunDirectory(finished))
    assert (past.step, [line["step"] for line in past.lines]) == (2, [1, 2])
    train(resume_plan(finished), resume=finished)
    assert steps_of(finished) == [1, 2, 3]
    assert (finished / "checkpoints" / "latest").read_text() == "step-00003"


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "interrupted"])
def test_a_run_that_has_lost_its_checkpoints_does_not_start_over(finished: Path, ended: bool) -> None:
    shutil.rmtree(finished / "checkpoints")
    if not ended:
        (finished / "summary.json").unlink()
    before = content(finished)
    with pytest.raises(ConfigError, match=r"has no checkpoint to resume from(.|\n)*3 steps(.|\n)*Nothing was changed"):
        train(resume_plan(finished, overrides=["algorithm.steps=4"]), resume=finished)
    assert content(finished) == before


def test_a_run_that_had_saved_nothing_starts_over_and_says_so(finished: Path) -> None:
    shutil.rmtree(finished / "checkpoints")
    for name in ("summary.json", "progress.json"):
        (finished / name).unlink()
    past = read_past(RunDirectory(finished))
    assert (past.step, list(past.lines)) == (0, [])
    assert past.warnings == ["no checkpoint had been saved yet: the run starts over, and its 3 steps are removed"]


def linked(run: Path, part: str, place: Path) -> None:
    shutil.move(run / part, place)
    (run / part).symlink_to(place)


@pytest.mark.parametrize("part", ["checkpoints", "rollouts"])
def test_a_link_to_the_folder_of_another_run_is_refused(finished: Path, tmp_path: Path, part: str) -> None:
    other = shutil.copytree(finished, tmp_path / "other")
    shutil.rmtree(finished / part)
    (finished / part).symlink_to(other / part)
    before = content(other)
    said = rf"{finished}/{part} is a link to \S+, which is a folder of another run, {other}: (.|\n)*Nothing was changed"
    with pytest.raises(RunFileError, match=said):
        train(resume_plan(finished, overrides=["algorithm.steps=4"]), resume=finished)
    for file in (f for f in finished.iterdir() if f.is_file()):
        file.unlink()
    with pytest.raises(RunFileError, match=said):  # a new run too
        RunDirectory.create(recorded_plan(other))
    assert content(other) == before


def not_measured_after(run: Path) -> None:
    """Make it a run that was killed after its last step."""
    for name in ("summary.json", "rollouts/report-00003.parquet"):
        (run / name).unlink()
    progress = json.loads((run / "progress.json").read_text())
    del progress["after"], progress["files"]["rollouts/report-00003.parquet"]
    (run / "progress.json").write_text(json.dumps(progress))


def test_what_is_in_a_folder_of_another_run_is_not_this_runs(finished: Path, tmp_path: Path) -> None:
    other = shutil.copytree(finished, tmp_path / "other")
    (other / "checkpoints" / "step-00003").rename(other / "checkpoints" / "step-00007")
    for name in ("train-00007", "dev-00007"):
        shutil.copy(other / "rollouts" / "train-00003.parquet", other / "rollouts" / f"{name}.parquet")
    not_measured_after(finished)
    for part in ("checkpoints", "rollouts"):
        shutil.rmtree(finished / part)
        (finished / part).symlink_to(other / part)
    found, shown = read_run(finished), words(diagnose(finished))
    assert ({file.step for file in found.files}, found.done) == ({0, 1, 2, 3}, 3)
    assert {file.place for file in found.files} <= recorded_in(finished).keys()
    said = rf"Damaged files:\n- {finished}/rollouts is a link to {other}/rollouts, which is a folder of another run"
    assert re.search(said, shown)
    assert f"A resume would be refused now: {finished}/rollouts is a link to " in shown
    assert f"--resume {finished}" not in shown


def test_checkpoints_on_another_disk_belong_to_one_run(finished: Path, tmp_path: Path) -> None:
    linked(finished, "checkpoints", tmp_path / "large")
    train(resume_plan(finished, overrides=["algorithm.steps=4"]), resume=finished)
    assert {f.name for f in (tmp_path / "large").glob("step-*")} == {"step-00003", "step-00004"}
    copy = shutil.copytree(finished, tmp_path / "copy", symlinks=True)
    before = content(tmp_path / "large")
    with pytest.raises(RunFileError, match=rf"large, which is a folder of another run, {finished}: "):
        train(resume_plan(copy, overrides=["algorithm.steps=5"]), resume=copy)
    (finished / "calls").rename(tmp_path / "calls")
    (finished / "calls").symlink_to(tmp_path / "calls")
    shutil.rmtree(finished / "rollouts")
    (finished / "rollouts").symlink_to(tmp_path / "calls")
    with pytest.raises(RunFileError, match=r"rollouts and \S+calls are links to the same folder"):
        RunDirectory(finished).lock()
    assert content(tmp_path / "large") == before
    moved = finished.rename(finished.with_name("moved"))
    copy.joinpath("checkpoints").unlink()
    (moved / "rollouts").unlink()
    shutil.move(copy / "rollouts", moved / "rollouts")
    run = RunDirectory(moved)
    run.lock()  # a run that was moved has its folder still
    run.release()
    moved.rename(finished)


def test_a_new_run_takes_no_folder_with_checkpoints(finished: Path, tmp_path: Path) -> None:
    plan = recorded_plan(finished)
    shutil.move(finished / "checkpoints", tmp_path / "large")
    shutil.rmtree(finished)
    finished.mkdir()
    (finished / "checkpoints").symlink_to(tmp_path / "large")
    with pytest.raises(ConfigError, match="already has a run"):
        RunDirectory.create(plan)


def test_two_resumes_at_once_are_refused(finished: Path) -> None:
    before = content(finished)
    other = RunDirectory(finished)
    other.lock()
    with pytest.raises(RunInUse, match=f"a run is active in .*toy: process {os.getpid()} on"):
        train(resume_plan(finished, overrides=["algorithm.steps=4"]), resume=finished)
    assert content(finished) == before
    other.release()
    train(resume_plan(finished, overrides=["algorithm.steps=4"]), resume=finished)
    assert steps_of(finished) == [1, 2, 3, 4]
    RunDirectory(finished).lock()  # a run that has ended releases the lock


def test_steps_without_a_checkpoint_that_are_made_again_are_told(finished: Path) -> None:
    for name in ("summary.json", "checkpoints/latest"):
        (finished / name).unlink()
    shutil.rmtree(finished / "checkpoints" / "step-00003")
    progress = json.loads((finished / "progress.json").read_text())
    del progress["checkpoints"]["step-00003"]
    (finished / "progress.json").write_text(json.dumps(progress))
    said = "the last checkpoint is that of step 2: step 3 had none, and is removed"
    assert said in read_past(RunDirectory(finished)).warnings
    assert said not in read_past(RunDirectory(finished), from_step=2).warnings, "as the user asks for"


def test_steps_are_counted_by_their_number_and_those_without_a_line_are_told(finished: Path) -> None:
    file = finished / "metrics.jsonl"
    lines = file.read_text().splitlines()
    for kept, said in ((lines[1:], "3 steps, 1 of them without a line"), (lines[2:], "3 steps, 2 of them without a")):
        file.write_text("".join(f"{line}\n" for line in kept))
        assert words(diagnose(finished)).startswith(f"toy: finished, {said}")
        assert compare([finished]).rows[0]["steps"] == 3
    file.write_text("")
    assert words(diagnose(finished)).startswith("toy: finished, 3 steps, 3 of them without a line in metrics.jsonl")


def test_a_resume_that_would_be_refused_is_not_recommended(finished: Path) -> None:
    """The settings of another run, which made fewer steps with another reward."""
    not_measured_after(finished)
    file = finished / "config.toml"
    text = file.read_text()
    command = f"agentrig train --resume {finished}"
    assert words(diagnose(finished)).count(command) == 1
    file.write_text(text.replace("steps = 3", "steps = 2"))
    assert f"has 3 steps already. Give it more: {command} algorithm.steps=6" in words(diagnose(finished))
    file.write_text(text.replace("steps = 3", "steps = 2").replace('use = "toy-parity"', 'use = "own"'))
    said = words(diagnose(finished))
    assert "Also know:\n- A resume would be refused now: " in said
    assert 'or write [reward] use = "toy-parity" there again' in said
    assert command not in said
    file.write_text(text)
    (finished / "checkpoints" / "step-00003" / "state.json").unlink(missing_ok=True)
    damaged = next(f for f in (finished / "checkpoints" / "step-00003").rglob("*") if f.is_file() and f.name[0] != ".")
    damaged.unlink()
    assert f"step-00002; to resume from it: {command} --from-step 2" in words(diagnose(finished))


def test_a_checkpoint_that_a_resume_refuses_is_named_with_what_it_says(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    not_measured_after(finished)
    latest = finished / "checkpoints" / "step-00003"
    weights = latest / "number.json"
    weights.write_bytes(weights.read_bytes()[::-1])
    with pytest.raises(CheckpointDamaged) as refused:
        read_past(RunDirectory(finished))
    first, cure = re.split(r"\n  Nothing in \S+ was changed\. ", str(refused.value))
    assert "its digest differs" in first
    assert f"A resume would be refused now: {first}. {cure}" in words(diagnose(finished))
    monkeypatch.setattr("agentrig.run.past.COMPARED", 0)
    shown = go_on(Evidence.of(read_run(finished)))
    assert "GB were not compared with their digests: a resume does that. Go on with: agentrig train --resume" in shown
    shutil.rmtree(latest)
    shutil.copytree(finished / "checkpoints" / "step-00002", latest)
    shown = go_on(Evidence.of(read_run(finished)))
    assert re.match(r"A resume would be refused now: .*it is what the run saved as step-00002", shown)


def test_lost_and_damaged_lines_are_reported(finished: Path) -> None:
    lines = (finished / "metrics.jsonl").read_text().splitlines()
    (finished / "metrics.jsonl").write_text("\n".join(["{" + lines[0], lines[2], lines[2], lines[2][:40]]))
    (finished / "rollouts" / "train-00002.parquet").unlink()
    warnings = read_past(RunDirectory(finished)).warnings
    assert [w.split(":")[0] for w in warnings[:1]] == ["metrics.jsonl"]
    assert "2 lines could not be read when the run resumed after step 3" in warnings[0]
    damaged = (finished / "metrics.jsonl").read_bytes()
    assert "has no line for steps 1 and 2, and step 3 has ended" in warnings[1]
    assert "has step 3 more than once" in warnings[2]
    assert warnings[3] == "rollouts/train-00002.parquet: gone, and the run wrote it"
    train(resume_plan(finished, overrides=["algorithm.steps=4"]), resume=finished)
    told = json.loads((finished / "manifest.json").read_text())["warnings"]
    assert set(warnings) <= set(told)
    logged = [json.loads(line) for line in (finished / "log.jsonl").read_text().splitlines()]
    assert {(4, text) for text in warnings} <= {(line["step"], line["text"]) for line in logged}
    assert json.loads((finished / "summary.json").read_text())["steps"] == 4
    assert (finished / "metrics.jsonl.damaged").read_bytes() == damaged
    assert "cannot be read" not in " ".join(read_run(finished).missing)


def test_a_resume_keeps_metrics_of_which_no_line_can_be_read(finished: Path) -> None:
    file = finished / "metrics.jsonl"
    file.write_text(file.read_text(), "utf-16")
    before = content(finished)
    with pytest.raises(RunFileError, match=r"metrics\.jsonl is damaged: none of its lines can be read"):
        train(resume_plan(finished, overrides=["algorithm.steps=4"]), resume=finished)
    assert content(finished) == before


@pytest.mark.parametrize(
    "damage",
    [{"failures": "none"}, {"time_s": 7}, {"time_s": {"rollout": "1"}}, {"prompt_tokens": {"a": 1}}, {"calls": "x"}],
    ids=str,
)
def test_a_line_that_the_totals_leave_out_is_named_as_such(finished: Path, damage: dict[str, Any]) -> None:
    change(finished, "metrics.jsonl", (), lambda lines: [line.update(damage) for line in lines[:2]])
    warnings = " ".join(read_past(RunDirectory(finished)).warnings)
    assert "what the run's totals and guards need is missing for steps 1 and 2, or has another type" in warnings
    assert "no line for step" not in warnings


def test_the_files_of_a_step_whose_line_is_lost_are_those_of_the_run(finished: Path) -> None:
    file = finished / "metrics.jsonl"
    file.write_text("".join(file.read_text().splitlines(True)[:-1]))
    missing = read_run(finished).missing
    assert any(
        "has no line for step 3, and step 3 has ended: the report and the summary leave this step" in t for t in missing
    )
    assert not any("no step wrote" in text for text in missing), missing


def test_a_step_that_is_there_twice_counts_once(finished: Path) -> None:
    file, lines = finished / "metrics.jsonl", read_past(RunDirectory(finished)).lines
    first, second, third = file.read_text().splitlines(True)
    file.write_text("".join([third, json.dumps(json.loads(second) | {"rollouts": 999}) + "\n", first, second]))
    past = read_past(RunDirectory(finished))
    assert list(past.lines) == list(lines), "which the summary adds up"
    assert any("has step 2 more than once: the report and the summary take the last line" in w for w in past.warnings)


def other_values(run: Path) -> None:
    change(run, "rollouts/train-00002.parquet", (0, "value"), lambda value: 1 - value, told=False)


def no_spans(run: Path) -> None:
    for at, text in enumerate(["null", "no JSON", "[" * 100_000 + "]" * 100_000]):
        change(run, "rollouts/train-00002.parquet", (at, "spans"), text, told=False)


def renamed(run: Path) -> None:
    (run / "rollouts" / "train-00003.parquet").rename(run / "rollouts" / "train-00007.parquet")


def copied(run: Path) -> None:
    shutil.copy(run / "rollouts" / "report-00000.parquet", run / "rollouts" / "report-00002.parquet")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (other_values, ["train-00002.parquet: changed since the run wrote it"]),
        pytest.param(
            no_spans, ["rollouts/train-00002.parquet: changed since the run wrote it"], marks=pytest.mark.slow
        ),
        (
            renamed,
            ["rollouts/train-00003.parquet: gone, and the run wrote it", "train-00007.parquet: no step wrote it"],
        ),
        (copied, ["rollouts/report-00002.parquet: no step wrote it"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_file_that_the_run_did_not_write_is_named(
    finished: Path, damage: Callable[[Path], None], said: Sequence[str]
) -> None:
    run = finished
    assert not [text for text in read_run(run).missing if "wrote" in text]
    damage(run)
    compared = compare([run]).rows[0]["missing"]
    watched = view(Run(run, "toy").data(), whole=False)["missing"]
    shown = str(diagnose(run)), build_report([run]).read_text()
    resumed = read_past(RunDirectory(run)).warnings
    for text in said:
        assert all(text in page for page in shown)
        assert any(text in each for each in compared)
        assert any(text in each for each in watched)
        if "00007" not in text:  # which a resumed run removes
            assert any(text in each for each in resumed), resumed


def test_files_that_no_step_wrote_are_left_out(finished: Path) -> None:
    rollouts, config = finished / "rollouts", (finished / "config.toml").read_text()
    files, measured = read_run(finished).files, read_past(RunDirectory(finished)).measured
    ends = [rollouts / f"report-{step:05d}.parquet" for step in (0, 3)]
    shutil.copy(ends[0], rollouts / "report-00009.parquet")
    (finished / "config.toml").write_text(config.replace("steps = 3", "steps = 9"))
    assert not any("the run went on" in text for text in read_run(finished).missing)
    (finished / "config.toml").write_text(config)
    for name in ("report-00002", "train-00009", "validation-00009"):
        shutil.copy(ends[0], rollouts / f"{name}.parquet")
    left = read_run(finished)
    assert (left.files, [file.path for file in left.measured()]) == (files, ends)
    assert read_past(RunDirectory(finished)).measured == measured, "which the summary counts"


@pytest.mark.parametrize(
    ("name", "place", "said"),
    [
        (
            *("progress.json", ("before", "accuracy")),
            r"the accuracy before training is \S+ in progress\.json, and \S+ in rollouts/report-00000\.parquet: "
            r"progress\.json was changed",
        ),
        ("progress.json", ("after", "reward"), r"the reward after training is \S+ in progress\.json"),
        ("summary.json", ("accuracy", "before"), r"the accuracy before training .*: summary\.json was changed"),
    ],
    ids=["before", "after", "summary"],
)
def test_a_record_that_contradicts_itself_is_not_resumed(
    ended_run: Callable[..., Path], name: str, place: Place, said: str
) -> None:
    run = ended_run("algorithm.steps=3", "run.report_tasks=8")
    read_past(RunDirectory(run))
    assert "contradicts itself" not in str(diagnose(run))
    change(run, name, place, lambda figure: figure + 0.01)
    before = content(run)
    done = CliRunner().invoke(main, ["train", "--resume", str(run), "algorithm.steps=4"])
    assert (done.exit_code, content(run)) == (1, before), done.output
    assert re.search(rf"the record contradicts itself: {said}", done.stderr), done.stderr
    assert "Nothing was changed" in done.stderr
    assert re.search(said, str(diagnose(run)))


def test_no_reader_shows_a_figure_of_a_file_of_another_run(finished: Path) -> None:
    shutil.copy(finished / "rollouts" / "report-00003.parquet", finished / "rollouts" / "report-00000.parquet")
    said = "rollouts/report-00000.parquet: changed since the run wrote it"
    data = read_run(finished)
    (first,) = [file for file in data.of_mode("report") if file.step == 0]
    assert (columns_of(first, ("value",)), data.missing) == (None, [said])
    assert (read_past(RunDirectory(finished)).warnings, over_common(finished, 3)) == ([said], ({}, ""))
    out = str(finished / "sent.jsonl")
    done = CliRunner().invoke(main, ["export-traces", str(finished), "--file", out])
    assert (done.exit_code, "report-00000.parquet" in done.stderr, "was changed since" in done.stderr) == (
        1,
        True,
        True,
    )


def test_validation_that_contradicts_its_rollouts_is_named(finished: Path) -> None:
    before = json.loads((finished / "progress.json").read_text())["before"]
    for step in (0, 1):
        copy = finished / "rollouts" / f"validation-{step:05d}.parquet"
        shutil.copy(finished / "rollouts" / "report-00000.parquet", copy)
    held: dict[str, Any] = {"validation_before": before["accuracy"], "validation_reward_before": before["reward"]}
    line = {"step": 1, "files": {"validation": files.sha256_of(copy)}}
    line |= {"validation_accuracy": before["accuracy"], "validation_reward": before["reward"]}

    def told(held: dict[str, Any], line: dict[str, Any]) -> list[str]:
        return [text for _, text in contradictions(finished, progress=held, summary={}, lines=[line])]

    assert told(held, line) == []
    (text,) = told({**held, "validation_before": 0.123}, line)
    assert "the validation accuracy before training is 0.123 in progress.json, and" in text
    (text,) = told(held, {**line, "validation_accuracy": 0.123})
    assert "the validation accuracy of step 1 is 0.123 in metrics.jsonl, and" in text
    assert told(held, {**line, "validation_accuracy": 0.123, "files": {"validation": "that of before a resume"}}) == []


def test_files_without_a_digest_are_not_compared(finished: Path) -> None:
    popped: list[Any] = []
    change(finished, "progress.json", (), lambda held: popped.append(sorted(held.pop("files"))))
    assert popped.pop() == ["rollouts/report-00000.parquet", "rollouts/report-00003.parquet"]
    change(finished, "metrics.jsonl", (), lambda lines: popped.extend(sorted(line.pop("files")) for line in lines))
    assert popped == [["calls", "train", "validation"]] * 3
    other_values(finished)
    (told,) = read_run(finished).missing
    assert "contradicts itself: step 2 has the reward" in told
    assert read_past(RunDirectory(finished)).warnings == []


def test_the_digests_of_a_resumed_run_are_those_of_its_files(finished: Path) -> None:
    train(resume_plan(finished, overrides=["algorithm.steps=4"], from_step=2), resume=finished)
    assert read_run(finished).missing == []
    assert read_past(RunDirectory(finished)).warnings == []
    files = json.loads((finished / "progress.json").read_text())["files"]
    assert sorted(files) == ["rollouts/report-00000.parquet", "rollouts/report-00004.parquet"]


@pytest.mark.slow
def test_the_wall_time_of_a_resumed_run_is_that_of_all_its_parts(finished: Path) -> None:
    change(finished, "summary.json", ("wall_s",), 1000.0)
    train(resume_plan(finished, overrides=["algorithm.steps=4"]), resume=finished)
    spent = json.loads((finished / "summary.json").read_text())["wall_s"]
    assert 1000 < spent < 1600
    (finished / "summary.json").unlink()  # killed before its end: what the last checkpoint knew
    past = read_past(RunDirectory(finished))
    assert 1000 < past.spent_s <= spent
    assert past.progress["wall_s"] == past.spent_s


def test_a_trained_model_is_not_measured_as_the_start(finished: Path, caplog: pytest.LogCaptureFixture) -> None:
    (finished / "progress.json").unlink()
    train(resume_plan(finished, overrides=["algorithm.steps=4", "run.block=[]"]), resume=finished)
    said = "has no measurement from before step 1 (progress.json)"
    assert said in caplog.text
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["accuracy"]["before"] is None
    assert summary["reward"]["before"] is None
    assert isinstance(summary["accuracy"]["after"], float)
    assert any(said in warning for warning in summary["warnings"])
    assert "before" not in json.loads((finished / "progress.json").read_text())
    assert said in (finished / "report.html").read_text()


def test_a_run_that_lost_its_record_goes_on_after_a_resume_that_only_measures(finished: Path) -> None:
    for name in ("progress.json", "summary.json"):
        (finished / name).unlink()
    train(resume_plan(finished), resume=finished)
    train(resume_plan(finished, overrides=["algorithm.steps=4"]), resume=finished)
    assert steps_of(finished) == [1, 2, 3, 4]


def shorten(checkpoint: Path) -> None:
    (checkpoint / "number.json").write_text("{")


def add(checkpoint: Path) -> None:
    (checkpoint / "added_tokens.json").write_text("{}")


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (shorten, r"number\.json has 1 bytes; \d+ were saved"),
        pytest.param(add, r"added_tokens\.json was not there when it was saved", marks=pytest.mark.slow),
    ],
)
def test_the_message_of_a_damaged_checkpoint_names_the_previous_one(
    finished: Path, model: ModelServer, harm: Callable[[Path], None], said: str
) -> None:
    harm(finished / "checkpoints" / "step-00003")
    before = content(finished)
    words = ["train", "--json", "--resume", str(finished), "algorithm.steps=4"]
    failed = CliRunner().invoke(main, words)
    assert failed.exit_code == 1
    assert isinstance(failed.exception, SystemExit), "it is told without a traceback"
    assert re.search(said, failed.stderr)
    if harm is shorten:  # sizes are compared at every look
        assert re.search(said, str(diagnose(finished)))
    assert content(finished) == before
    assert f"agentrig train --resume {finished} --from-step 2" in failed.stderr
    done = CliRunner().invoke(main, [*words, "--from-step", "2"])
    assert done.exit_code == 0, done.output
    assert steps_of(finished) == [1, 2, 3, 4]
    assert json.loads(done.stdout)["complete"] is True
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["algorithm"]["number"] == 0.5 * (1 + 2 + 3 + 4)  # resumed from the number of step 2


def test_the_error_of_an_unreadable_checkpoint_says_what_to_do(finished: Path) -> None:
    (finished / "checkpoints" / "step-00003" / checkpoints.LIST).unlink()  # of an earlier version
    before = content(finished)
    with (
        pytest.raises(CheckpointDamaged, match=r"step-00003 is damaged: ValueError: no number"),
        checkpoints.loading(finished / "checkpoints" / "step-00003"),
    ):
        raise ValueError("no number")
    assert content(finished) == before


def test_from_step_needs_a_step_with_a_checkpoint(finished: Path) -> None:
    with pytest.raises(ConfigError, match=r"no checkpoint of step 1; the steps that have one: 2, 3"):
        read_past(RunDirectory(finished), from_step=1)
    done = subprocess.run(
        [sys.executable, "-m", "agentrig", "train", "--from-step", "2"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "--from-step needs --resume RUN" in done.stderr


def test_directories_of_other_versions_are_refused_with_a_message(finished: Path) -> None:
    facts = json.loads((finished / "manifest.json").read_text())
    config = (finished / "config.toml").read_text()
    (finished / "manifest.json").write_text(json.dumps({**facts, "agentrig": "0.0.9"}))
    (finished / "config.toml").write_text(config.replace("[runners]", "[runners]\nspeed = 3"))
    with pytest.raises(ConfigError, match=r'no key "speed"[\s\S]*agentrig 0\.0\.9 wrote .*config\.toml'):
        resume_plan(finished)
    (finished / "config.toml").write_text(config)
    (finished / "manifest.json").write_text(json.dumps({**facts, "agentrig": "9.1", "format": 2}))
    with pytest.raises(ConfigError, match=r"written by agentrig 9\.1 in format 2; this version reads formats up to 1"):
        resume_plan(finished)


def test_files_are_flushed_before_a_resume_relies_on_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def flushed(descriptor: int) -> None:
        events.append(("flush", os.readlink(f"/proc/self/fd/{descriptor}").removeprefix(f"{tmp_path}/")))
        fsync(descriptor)

    def renamed(source: Any, target: Any) -> None:
        events.append(("rename", str(Path(target).relative_to(tmp_path))))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", renamed)
    run = RunDirectory(tmp_path / "run")
    run.append_metrics({"step": 1})
    assert events == [("flush", "run/metrics.jsonl"), ("flush", "run")]
    events.clear()

    def write(folder: Path) -> None:
        (folder / "trainer").mkdir()
        (folder / "trainer" / "state").write_text("1")

    run.checkpoints.save(1, write, keep=False)
    there = events.index(("rename", "run/checkpoints/step-00001"))
    before = {name for what, name in events[:there] if what == "flush"}
    part = "run/checkpoints/.step-00001.part"
    assert before == {f"{part}/trainer/state", f"{part}/trainer", f"{part}/.files.json", part}
    assert events[there + 1 :] == [
        ("flush", "run/checkpoints"),
        ("flush", "run/checkpoints/.latest.part"),
        ("rename", "run/checkpoints/latest"),
        ("flush", "run/checkpoints"),
    ]
    events.clear()
    run.write_rollouts([], mode="train", step=1)
    assert [what for what, _ in events] == ["flush", "rename", "flush"]
    events.clear()
    run.write_json("progress.json", {})
    assert [what for what, _ in events] == ["flush", "rename", "flush"]


def test_a_full_disk_is_an_error_and_an_unsupported_flush_of_a_folder_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    files.flush(tmp_path)  # some network file systems cannot
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Invalid argument"):
        files.flush(tmp_path / "file")


def test_a_crash_during_a_checkpoint_is_repaired(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    for step in (1, 2):
        run.checkpoints.save(step, lambda folder: (folder / "model").write_text("whole") and None, keep=False)
    folder = run.path / "checkpoints"
    os.replace(folder / "step-00002", folder / ".step-00002.old")  # killed between the two renames
    for left in (".step-00003.part", ".step-00001.gone"):
        (folder / left).mkdir()
    assert read_past(run).step == 2
    assert (folder / ".step-00003.part").is_dir(), "a resume that fails later removes nothing"
    run.rewind(2)
    assert sorted(f.name for f in folder.iterdir()) == ["latest", "step-00001", "step-00002"]
