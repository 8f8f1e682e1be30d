"""Run directories that are complete, resumed, cut off or damaged."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from changed import Place, change
from click.testing import CliRunner

from agentrig.cli.entry import main
from agentrig.processes.locks import Lock
from agentrig.testing.run_directory import write_run
from agentrig.view import figures
from agentrig.view.comparison import compare
from agentrig.view.diagnosis import diagnose
from agentrig.view.page import render
from agentrig.view.reading import read_run
from agentrig.view.watch.app import serving
from agentrig.view.watch.runs import Run


@pytest.mark.parametrize("name", ["config.toml", "manifest.json", "metrics.jsonl", "summary.json", "progress.json"])
def test_a_link_to_nothing_is_named(tmp_path: Path, name: str) -> None:
    directory = write_run(tmp_path / "run", steps=3)
    (directory / name).unlink(missing_ok=True)
    (directory / name).symlink_to(tmp_path / "gone")
    assert f"{name} is a link to what is not there: {tmp_path}/gone" in read_run(directory).unread


@pytest.mark.parametrize("ended", [True, False])
def test_a_run_whose_metrics_are_empty_is_not_called_a_run_without_a_step(tmp_path: Path, ended: bool) -> None:
    directory = write_run(tmp_path / "run", steps=3, ended=ended)
    if ended:
        (directory / "summary.json").write_text(json.dumps({"complete": True, "steps": 3}))
    else:
        (directory / "checkpoints" / "step-00003").mkdir()
    (directory / "metrics.jsonl").write_text("")
    shown = [CliRunner().invoke(main, [command, str(directory)]) for command in ("why", "report", "compare")]
    assert [each.exit_code for each in shown] == [2, 0, 0]
    for told in (render([read_run(directory)]), *(each.output for each in shown)):
        assert "metrics.jsonl has no line for steps 1, 2 and 3, and step 3 has ended" in told
        assert "no training step has ended" not in told
        assert "before its first step had ended" not in told


def test_the_later_line_of_a_repeated_step_counts(tmp_path: Path):
    directory = write_run(tmp_path / "run", steps=3)
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "reward": 0.987}) + "\n")
        file.write('{"step": 4, "rew')  # a crash in the middle of a line
    run = read_run(directory)
    assert [r["step"] for r in run.steps] == [1, 2, 3]
    assert run.steps[1]["reward"] == 0.987
    assert any("metrics.jsonl: line 5 cannot be read" in text for text in run.missing)
    assert any("has step 2 more than once" in text for text in run.missing)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda lines: lines[0].update(reward=float("nan")), r"a reward that is no finite number for step 1\b"),
        (lambda lines: lines[1].update(reward="high"), r"a reward that is no finite number for step 2\b"),
        (lambda lines: lines[1].update(reward=10**400), r"a reward that is no finite number for step 2\b"),
        (
            lambda lines: [line.update(tokens_per_s=1e308) for line in lines],
            r"1e\+308 as tokens_per_s of steps 1, 2 and 3,",
        ),
        (
            lambda lines: lines[1].update(tokens_per_s=10**400),
            r"as tokens_per_s of step 2, which no run can have: the re",
        ),
        (lambda lines: lines[1].update(rollouts=-5, accuracy=7), r"has 7 as accuracy of step 2, which no run can have"),
        (lambda lines: lines[1].update(time=1e18, rollouts=-5), r"has -5 as rollouts of step 2, which no run can have"),
        (lambda lines: lines[1]["time_s"].update(update=-1.0), r"has -1\.0 as time_s\.update of step 2, which no run"),
        (lambda lines: lines[2].update(step=10**400), r"metrics\.jsonl: line 3 cannot be read"),
        (lambda lines: lines[2].update(step=10**8), r"no line for steps 3, 4, .* and step 100000000 has ended"),
        (lambda lines: lines.pop(1), r"no line for step 2, and step 3 has ended"),
        (lambda lines: lines.pop(), r"no line for step 3, and step 3 has ended"),
        (lambda lines: lines[0].update(reward=0.91875), r"contradicts itself: step 1 has the reward 0\.91875 in metr"),
    ],
)
def test_metrics_that_lack_something_or_contradict_the_rollouts_are_told(
    tmp_path: Path, change: Callable[[list[dict[str, Any]]], None], said: str
) -> None:
    directory = write_run(tmp_path / "run", steps=3)
    assert "metrics.jsonl" not in str(diagnose(directory))
    file = directory / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    change(lines)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert re.search(said, str(diagnose(directory)))
    assert re.search(said, render([read_run(directory)]))


def test_impossible_figures_do_not_take_a_runs_live_page(tmp_path: Path) -> None:
    """It answered with HTTP 500: the mean of such figures is larger than any float."""
    directory = write_run(tmp_path / "run", steps=3)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    text = "".join(json.dumps({**line, "tokens_per_s": 1e308, "step_s": 1e308}) + "\n" for line in lines)
    (directory / "metrics.jsonl").write_text(text)
    with serving(directory) as link:
        reply = httpx.get(f"{link}run/run", follow_redirects=True, timeout=30)
    assert (reply.status_code, "which no run can have" in reply.text) == (200, True)


NO_OBJECT = [("progress.json", "before"), ("progress.json", "after"), ("summary.json", "accuracy")]
IMPOSSIBLE: list[tuple[str, Place, Any, str]] = [
    *(("progress.json", ("before", key), value, f"before.{key} is {value!r}, which no run can have")
      for key, value in (("accuracy", 7), ("n", 1e308), ("n", -3), ("reward", 1e308))),
    *((name, (key,), "x", f"{key} is no object") for name, key in NO_OBJECT),
    *(("summary.json", (key,), [1], f"{key} is [1], not a number from 0 to")
      for key in ("steps", "rollouts", "train_rollouts", "wall_s")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "place", "value", "said"), IMPOSSIBLE)
def test_a_figure_that_no_run_can_have_is_left_out_and_named(
    tmp_path: Path, name: str, place: Place, value: Any, said: str
) -> None:
    directory = write_run(tmp_path / "run", steps=3)
    change(directory, name, place, value)
    for told in (str(diagnose(directory)), render([read_run(directory)]), str(compare([directory]).rows[0]["missing"])):
        assert f"{name} is damaged: {said}" in told


def test_a_line_that_is_too_deep_or_has_too_many_digits_is_ignored(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=3)
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "x": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
        file.write('{"step": ' + "9" * 5000 + "}\n")
    (directory / "log.jsonl").write_text("[" * 100_000 + "]" * 100_000 + "\n")
    said = "metrics.jsonl: lines 4 and 5 cannot be read"
    assert said in str(diagnose(directory))
    assert said in render([read_run(directory)])


@pytest.mark.parametrize(("key", "end"), [("accuracy", "after"), ("reward", "after")])
def test_a_summary_that_contradicts_the_measurements_is_told(
    ended_run: Callable[..., Path], key: str, end: str
) -> None:
    finished = ended_run()
    file = finished / "summary.json"
    assert "contradicts itself" not in str(diagnose(finished))
    summary = json.loads(file.read_text())
    summary[key][end] = 0.925
    file.write_text(json.dumps(summary))
    progress = json.loads((finished / "progress.json").read_text())
    progress["before"]["accuracy"] = 0.0625
    (finished / "progress.json").write_text(json.dumps(progress))
    for said in (
        f"contradicts itself: the {key} {end} training is 0.925 in summary.json",
        "contradicts itself: the accuracy before training is 0.0625 in progress.json",
    ):
        told = str(diagnose(finished))
        assert told.count(said) == 1
        assert said in render([read_run(finished)])
        for words in (["compare"], ["report"]):
            shown = CliRunner().invoke(main, [*words, str(finished)], env={"COLUMNS": "400"})
            assert said in " ".join(shown.output.split()), shown.output


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "log.jsonl", "summary.json", "rollouts/train-00002.parquet", "config.toml"]
)
@pytest.mark.parametrize("ended", [True, False])  # without a summary, rollouts are counted in their files
def test_a_pipe_with_the_name_of_a_file_is_named_and_not_read(tmp_path: Path, name: str, ended: bool) -> None:
    directory = write_run(tmp_path / "run", steps=2, ended=ended)
    (directory / name).unlink(missing_ok=True)
    os.mkfifo(directory / name)
    page = render([read_run(directory)])
    compare([directory])
    if name != "log.jsonl":
        assert f"{Path(name).name} cannot be read: it is no regular file" in page
        assert f"{Path(name).name} cannot be read: it is no regular file" in str(diagnose(directory))


def test_the_lock_says_whether_a_run_goes_on_or_has_crashed(tmp_path: Path):
    directory = write_run(tmp_path / "run", steps=2)
    config = (directory / "config.toml").read_text().replace("[algorithm]", "[algorithm]\nsteps = 4")
    (directory / "config.toml").write_text(config)
    whole = (directory / "summary.json").read_text()
    (directory / "summary.json").unlink()
    folder = Run(directory, "run")
    lock = Lock(directory / "run.lock")
    assert lock.take()
    running, stamp = read_run(directory), folder.stamp()
    lock.release()
    crashed = read_run(directory)
    assert (figures.status(running), figures.status(crashed)) == ("running", "crashed")
    seconds = [line["step_s"] for line in running.steps]
    assert figures.progress(running) == f"step 3 of 4, about {round(2 * seconds[1])} s left, then the last measurement"
    assert figures.progress(crashed) == ""
    assert not [text for text in running.missing if "summary.json" in text]
    assert [text for text in crashed.missing if "summary.json is not there, and no process holds run.lock" in text]
    assert folder.stamp() != stamp, "an open page is told of the crash"
    (directory / "summary.json").write_text(whole[:-20])
    assert figures.status(read_run(directory)) == "ended"
    (directory / "summary.json").write_text(json.dumps({**json.loads(whole), "complete": False}))
    assert figures.status(read_run(directory)) == "stopped"
    (directory / "error.json").write_text(json.dumps({"error": "RunStopped", "message": "no triplets"}))
    assert figures.status(read_run(directory)) == "stopped by an error"


def test_a_resume_that_starts_shows_the_end_before_it_until_a_step_has_ended(tmp_path: Path):
    directory = write_run(tmp_path / "run", steps=2)
    text = (directory / "config.toml").read_text().replace("[algorithm]", "[algorithm]\nsteps = 2")
    (directory / "config.toml").write_text(text)
    ended = figures.held_out(read_run(directory))
    name = next(f.name for f in (directory / "rollouts").glob("report-*2.parquet"))
    progress = json.loads((directory / "progress.json").read_text())
    files = {"files": {"rollouts/report-00000.parquet": "", f"rollouts/{name}": ""}}
    (directory / "progress.json").write_text(json.dumps({**progress, **files}))
    lock = Lock(directory / "run.lock")
    assert lock.take()
    starting = read_run(directory)
    assert (figures.status(starting), figures.progress(starting)) == ("running", "resuming after step 2")
    assert figures.held_out(starting) == ended
    assert ended["accuracy"]["after"] is not None
    (directory / "config.toml").write_text(text.replace("steps = 2", "steps = 4"))  # it has begun
    assert figures.progress(read_run(directory)).startswith("step 3 of 4, resuming, about ")
    (directory / "rollouts" / name).unlink()
    assert name not in " ".join(read_run(directory).missing), "the run itself removes it at its next checkpoint"
    line = json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**line, "step": 3}) + "\n")
    assert figures.held_out(read_run(directory))["accuracy"]["after"] is None
    lock.release()


def test_a_stopped_run_that_starts_again_is_resuming_until_it_has_begun(tmp_path: Path):
    directory = write_run(tmp_path / "run", steps=2, ended=False)
    text = (directory / "config.toml").read_text().replace("[algorithm]", "[algorithm]\nsteps = 4")
    (directory / "config.toml").write_text(text)
    (directory / "error.json").write_text(json.dumps({"error": "Interrupted", "message": "ended early", "cause": ""}))
    os.utime(directory / "error.json", (0, 0))  # long before
    lock = Lock(directory / "run.lock")
    assert lock.take()
    assert figures.progress(read_run(directory)).startswith("step 3 of 4, resuming, about ")
    (directory / "error.json").unlink()  # it has begun
    assert figures.progress(read_run(directory)).startswith("step 3 of 4, about ")
    lock.release()


@pytest.mark.parametrize("steps", [0, 9])  # the second has two validations, too few tasks to be sure of a gain
def test_a_running_run_has_no_warning_for_what_is_still_to_come(tmp_path: Path, steps: int):
    directory = write_run(tmp_path / "run", steps=steps, ended=False)
    lock = Lock(directory / "run.lock")
    assert lock.take()
    with serving(directory) as link:
        texts = [httpx.get(f"{link}run/run{part}").text for part in ("", "/why", "/examples")]
    lock.release()
    assert [text for text in texts if 'class="warn"' in text or 'pill warn"' in text or "unfinished" in text] == []
    assert '<span class="pill running">running</span>' in texts[0]
