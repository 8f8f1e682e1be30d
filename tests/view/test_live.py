"""The live display: its output on a terminal and in a pipe, with events from many threads."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
from rich.console import Console

from agentrig import Score
from agentrig.errors import RunStopped
from agentrig.observers import RunEnd, RunError, RunStart, StepEnd
from agentrig.processes.ends import Interrupted, RunSignals, handling
from agentrig.testing.run_directory import rollout_of, write_run
from agentrig.view import live
from agentrig.view.live import LiveDisplay

pytestmark = pytest.mark.usefixtures("quick_images")


def display(*, terminal: bool = False) -> tuple[LiveDisplay, io.StringIO]:
    buffer = io.StringIO()
    return LiveDisplay(Console(file=buffer, width=110, force_terminal=terminal)), buffer


def start(steps: int | None = 20, first_step: int = 1) -> RunStart:
    return RunStart(directory=Path("runs/demo"), config={}, steps=steps, first_step=first_step)


def panel(shown: LiveDisplay) -> str:
    console = Console(file=io.StringIO(), width=110, color_system=None)
    with console.capture() as capture:
        console.print(shown.panel())
    return capture.get()


METRICS = {
    "step": 3,
    "reward": 0.5,
    "rollouts": 16,
    "failures": {"deadline": 2, "llm-error": 1},
    "step_s": 10.0,
    "time_s": {"rollout": 6.0, "reward": 0.5, "update": 3.0},
    "rollouts_per_s": 12.34,
    "tokens_per_s": 1830.0,
    "validation_accuracy": 0.482,
}


def test_the_folder_is_named_before_anything_starts():
    shown, buffer = display()
    shown.starting(Path("runs/demo"))
    assert buffer.getvalue() == "run runs/demo: starting the agent, the model's server and the learner …\n"
    shown.on_run_start(event=start(9))
    assert buffer.getvalue().splitlines()[1:] == ["9 steps of training to do"]
    shown, buffer = display(terminal=True)
    try:
        shown.starting(Path("runs/demo"))
        assert buffer.getvalue().startswith("run runs/demo\n")
        until = time.monotonic() + 30
        while "⠋" not in buffer.getvalue() and time.monotonic() < until:
            time.sleep(0.02)
        assert "starting the agent, the model's server and the learner …" in buffer.getvalue().partition("⠋")[2]
        shown.on_run_start(event=start(9))
        assert "starting the agent" not in buffer.getvalue().partition("9 steps of training to do")[2]
    finally:
        shown.close()


def test_what_is_done_without_a_line_is_said_before_a_run_has_a_folder_and_after_its_last_step(
    monkeypatch: pytest.MonkeyPatch,
):
    def waited(shown: LiveDisplay, buffer: io.StringIO, doing: str) -> bool:
        until = time.monotonic() + 30
        while f"{doing}: " not in buffer.getvalue() and time.monotonic() < until:
            time.sleep(0.02)
        return f"{doing}: 0 s\n" in buffer.getvalue()

    monkeypatch.setattr(live, "SILENT_S", 0.05)
    shown, buffer = display()
    shown.preparing()
    assert waited(shown, buffer, live.PREPARING)
    shown.starting(Path("runs/demo"))
    assert waited(shown, buffer, live.STARTING)
    shown.on_run_start(event=start())
    assert waited(shown, buffer, live.FIRST_ROLLOUT)
    shown.on_rollout_end(rollout_of(0, right=True, mode="train", step=1))
    silent = buffer.getvalue()
    time.sleep(0.2)
    assert buffer.getvalue() == silent, "the first rollout ends it"
    shown.on_step_end(event=StepEnd(step=19, metrics=METRICS))
    assert live.ENDING not in buffer.getvalue()
    shown.on_step_end(event=StepEnd(step=20, metrics=METRICS))
    assert waited(shown, buffer, live.ENDING)
    shown.close()
    shown, buffer = display(terminal=True)
    shown.preparing()
    shown.close()
    assert f"{live.PREPARING} …" in buffer.getvalue()


@pytest.mark.parametrize("first", [1, 8])
def test_the_panel_says_that_the_auditor_checks_the_first_two_steps(tmp_path: Path, first: int):
    shown, _ = display(terminal=True)
    begun = attrs.evolve(start(60, first), directory=write_run(tmp_path / "demo", steps=7))
    shown.on_run_start(event=attrs.evolve(begun, config={"run": {"audit": True}}))
    for step in (first, first + 1, first + 2):
        shown.on_step_end(event=StepEnd(step=step, metrics={**METRICS, "step": step}))
        again = " after a resume" if first > 1 else ""
        checking = f"checking step {step} (the auditor looks at the first 2 steps{again})"
        assert (checking in panel(shown)) == (step < first + 2)
        assert "rollouts, 0 right" not in panel(shown)
    shown.on_rollout_end(rollout=rollout_of(0, right=True, mode="train", step=first + 1))
    assert "the agent at work: 1 rollout" in panel(shown)
    shown.close()
    piped, buffer = display()
    piped.on_run_start(event=attrs.evolve(begun, config={"run": {"audit": True}}))
    piped.on_step_end(event=StepEnd(step=first, metrics={**METRICS, "step": first}))
    assert "eta" not in buffer.getvalue(), "the first step is unlike the others"
    piped.on_step_end(event=StepEnd(step=first + 1, metrics={**METRICS, "step": first + 1}))
    step, checking = buffer.getvalue().splitlines()[-2:]
    assert " and the checks of the first steps" in step
    assert checking.startswith(f"checking step {first + 1} (the auditor")
    piped.on_step_end(event=StepEnd(step=first + 2, metrics={**METRICS, "step": first + 2}))
    assert re.search(r"eta [\d:]+ without the last measurement\n$", buffer.getvalue())


def test_a_pipe_gets_one_plain_line_a_step(tmp_path: Path):
    directory = write_run(tmp_path / "demo", steps=9)
    shown, buffer = display()
    shown.on_run_start(event=start(9))
    for line in (directory / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        for i in range(3):
            shown.on_rollout_end(rollout=rollout_of(i, right=True, mode="train", step=metrics["step"]))
        shown.on_step_end(event=StepEnd(step=metrics["step"], metrics=metrics))
    summary = json.loads((directory / "summary.json").read_text())
    (directory / "report.html").touch()
    shown.on_run_end(event=RunEnd(directory=directory, summary=summary))
    lines = buffer.getvalue().splitlines()
    assert "\x1b" not in buffer.getvalue()
    assert lines[0] == "run runs/demo, 9 steps of training to do"
    assert lines[1].startswith("step 1/9  reward ")
    assert "eta" in lines[8]
    assert "eta" not in lines[9]
    before, after = (f"{100 * summary['accuracy'][end]:.1f}%" for end in ("before", "after"))
    accuracy, interval, calls = lines[11:14]
    assert lines[10].split() == ["40", "held-out", "tasks", "before", "after"]
    assert accuracy.split()[:3] == ["accuracy", before, after]
    assert interval.startswith("95% interval")
    assert calls.startswith("  calls scored below 1")
    assert " ".join(lines[14].split()) == "by class before after p corrected for 2 classes"
    assert [line.split()[:2] for line in lines[15:17]] == [["half", "="]] * 2
    assert "sign test p" in lines[17]
    assert f"report  {directory / 'report.html'}" in lines
    assert max(map(len, lines)) > 110  # a command is one line, so that it can be copied


def test_the_line_of_a_step_has_every_figure():
    shown, buffer = display()
    shown.on_run_start(event=start())
    shown.on_step_end(event=StepEnd(step=3, metrics=METRICS))
    assert buffer.getvalue().splitlines()[1] == (
        "step  3/20  reward 0.500  validation 48.2%  12.3 rollouts/s  1,830 tokens/s"
        "  10.0 s: rollouts 60%, update 30%, scoring 5%  failed 3 (2 deadline, 1 llm-error)  eta 2:50"
    )
    parts = {"audit": 30.0, "reward": 0.7, "rollout": 6.0}
    shown.on_step_end(event=StepEnd(step=4, metrics={**METRICS, "step_s": 40.0, "time_s": parts}))
    costs = "  40.0 s: auditing the step before 75%, rollouts 15%, run.audit=false leaves auditing out  "
    assert costs in buffer.getvalue()
    assert buffer.getvalue().endswith("eta 2:40\n"), "later steps wait for no such audit"
    shown, buffer = display()
    shown.on_step_end(event=StepEnd(step=3, metrics={**METRICS, "accuracy": 0.25, "validation_reward": -0.25}))
    assert "reward 0.500  training accuracy (sampled) 25.0%  validation 48.2% (reward -0.250)" in buffer.getvalue()
    shown, buffer = display()
    shown.on_step_end(event=StepEnd(step=1, metrics={"step": 1, "reward": None, "tokens_per_s": None, "time_s": {}}))
    assert buffer.getvalue() == "step 1\n"


@pytest.mark.parametrize(("alike", "change", "idle"), [(1.0, 0.0, True), (1.0, 0.1, False), (0.9, 0.0, False)])
def test_a_step_without_an_update_because_all_groups_are_alike_says_so(alike: float, change: float, idle: bool):
    shown, buffer = display()
    metrics = {**METRICS, "zero_variance_groups": alike, "algorithm": {"weight_change": change}}
    shown.on_step_end(event=StepEnd(step=3, metrics=metrics))
    assert ("  reward 0.500  no update: all rewards alike within every group  " in buffer.getvalue()) == idle
    assert ("no update" in buffer.getvalue()) == idle
    assert ("  reward 0.500  all rewards alike within every group  " in buffer.getvalue()) == (alike == 1 and not idle)
    for share in (0.0, 0.12, 0.78):  # in every step, so that it can be followed
        shown.on_step_end(event=StepEnd(step=4, metrics={**metrics, "groups": 8, "zero_variance_groups": share}))
        assert f"  {share:.0%} of groups had equal rewards  " in buffer.getvalue()
        figures = {**metrics, "groups": 8, "zero_variance_groups": share, "untaught_groups": share}
        shown.on_step_end(event=StepEnd(step=4, metrics=figures))
        assert f"  {share:.0%} of groups taught nothing (all rewards alike)  " in buffer.getvalue()
    for equal, untaught in ((0.25, 0.75), (1.0, 0.5)):  # a credit may leave groups out, or learn from equal rewards
        figures = {**metrics, "zero_variance_groups": equal, "untaught_groups": untaught, "algorithm": {}}
        shown.on_step_end(event=StepEnd(step=5, metrics=figures))
        assert (
            f"  {untaught:.0%} of groups taught nothing (rollouts' rewards alike in {equal:.0%})  " in buffer.getvalue()
        )
    shown.on_run_start(event=attrs.evolve(start(), config={"credit": {"use": "turn"}}))
    shown.on_step_end(event=StepEnd(step=6, metrics={**figures, "untaught_groups": 0.3, "unlike_calls": 0.75}))
    assert "  30% of groups taught nothing (calls' rewards alike in 25%)  " in buffer.getvalue()


def test_a_step_of_demonstrations_has_their_number_and_loss_instead_of_rewards():
    shown, buffer = display()
    shown.on_run_start(event=attrs.evolve(start(), config={"algorithm": {"demonstrations": "chats.jsonl"}}))
    metrics = {**METRICS, "accuracy": 1.0, "algorithm": {"loss": 0.25}}
    shown.on_step_end(event=StepEnd(step=3, metrics=metrics))
    line = buffer.getvalue().splitlines()[1]
    assert line.startswith("step  3/20  demonstrations learned 13  loss 0.2500  validation 48.2%  10.0 s: ")
    assert not any(word in line for word in ("reward", "sampled", "rollouts/s", "tokens/s"))


def test_the_accuracy_before_training_is_said_once_it_is_measured_and_how_it_samples():
    shown, buffer = display()
    shown.on_run_start(event=attrs.evolve(start(), config={"algorithm": {"val_temperature": 0.0, "temperature": 1.0}}))
    for i in range(5):
        failure = "deadline" if i == 4 else None
        shown.on_rollout_end(rollout=rollout_of(i, right=i < 2, mode="report", step=0, failure=failure))
    assert "held-out accuracy before training (greedy): " not in buffer.getvalue()
    for i in range(2):
        shown.on_rollout_end(rollout=rollout_of(i, right=True, mode="train", step=1))
    assert buffer.getvalue().splitlines()[-1] == (
        "held-out accuracy before training (greedy): 50.0% of 4 tasks; training samples at temperature 1, so its "
        "accuracy is usually lower"
    )
    assert "50.0% before training (greedy)" in panel(shown)
    shown.on_step_end(event=StepEnd(step=3, metrics={**METRICS, "accuracy": 0.25}))
    assert "training accuracy (sampled) 25.0%  validation (greedy) 48.2%" in buffer.getvalue()


def test_a_model_that_knows_training_tasks_by_heart_is_named_in_place_of_its_sampling(tmp_path: Path):
    directory = write_run(tmp_path / "run", steps=1)
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["data"] = {"train": {"tasks": 88, "labels": 44}, "report": {"tasks": 2}}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    shown, buffer = display()
    config = {"algorithm": {"val_temperature": 0.0, "temperature": 1.0}}
    shown.on_run_start(event=attrs.evolve(start(), config=config, directory=directory))
    for i, mode in enumerate(("report", "report", "train")):
        shown.on_rollout_end(rollout=rollout_of(i, right=i == 0, mode=mode, step=0))
    assert buffer.getvalue().splitlines()[-1] == (
        "held-out accuracy before training (greedy): 50.0% of 2 tasks; 44 of the 88 training tasks are the model's "
        "labels: their accuracy may be higher"
    )
    assert "usually" not in buffer.getvalue()


def test_the_time_left_includes_the_measurement_after_training(monkeypatch: pytest.MonkeyPatch):
    shown, buffer = display()
    shown.on_run_start(event=start())
    now = time.monotonic()
    for after, mode, step in ((0.0, "report", 0), (43.0, "report", 0), (43.0, "train", 1)):
        monkeypatch.setattr(time, "monotonic", lambda after=after: now + after)
        shown.on_rollout_end(rollout=rollout_of(0, right=True, mode=mode, step=step))
    shown.on_step_end(event=StepEnd(step=19, metrics={**METRICS, "step": 19}))
    assert buffer.getvalue().endswith("eta 0:53 with the last measurement\n")  # a step of 10 s, and 43 s
    shown, buffer = display()
    shown.on_run_start(event=attrs.evolve(start(), config={"algorithm": {"validate_every": 6}}))
    for step, parts in ((11, {}), (12, {"validation": 30.0}), (13, {})):
        metrics = {**METRICS, "step": step, "step_s": 10.0 + sum(parts.values()), "time_s": parts}
        shown.on_step_end(event=StepEnd(step=step, metrics=metrics))
    etas = re.findall("eta (.*)", buffer.getvalue())
    assert etas == ["1:30", "1:50", "1:40"], "steps of 10 s, and the validation of step 18 once one was measured"


def test_no_time_is_left_once_a_signal_has_ended_the_run():
    session = SimpleNamespace(begun=True, stopping=False, measuring="", checking=0, untouched=False, advice=str)
    signals = RunSignals(session, abort=lambda error: None)
    with handling(signals):
        for stopped in (False, True):
            shown, buffer = display()
            shown.on_run_start(event=start())
            for step in (2, 3):
                shown.on_step_end(event=StepEnd(step=step, metrics={**METRICS, "step": step}))
            assert ("eta" in buffer.getvalue()) != stopped
            if not stopped:
                signals(signal.SIGINT, None)


def test_the_panel_counts_running_rollouts():
    shown, _ = display(terminal=True)
    try:
        shown.on_run_start(event=start())
        for i in range(5):
            failure = "deadline" if i == 4 else None
            shown.on_rollout_end(rollout=rollout_of(i, right=i < 2, mode="report", step=0, failure=failure))
        text = panel(shown)
        assert "measuring held-out accuracy before training: 5 rollouts, 2 right" in text
        assert "0 of 20 steps" in text
        assert "1 (1 deadline)" in text
        shown.on_rollout_end(rollout=rollout_of(1, right=True, mode="train", step=1))
        assert "the agent at work: 1 rollout, 1 right" in panel(shown)
        shown.on_step_end(event=StepEnd(step=3, metrics={**METRICS, "accuracy": 0.25, "validation_reward": -0.25}))
        score = Score(status="ok", value=0.7, correct=True)
        shown.on_rollout_end(rollout=attrs.evolve(rollout_of(0, right=False, mode="train", step=4), score=score))
        shown.on_rollout_end(rollout=rollout_of(1, right=False, mode="train", step=4))
        text = panel(shown)
        assert re.search(r"held out +50\.0% before training", text)
        assert re.search(r"training accuracy \(sampled\) +25\.0%", text)
        for expected in ("3 of 20 steps", "48.2% (reward -0.250) at step 3", "1,830 tokens/s", "rollouts 60%", "0.500"):
            assert expected in text
        for expected in ("eta 2:50", "25.0%", "2 rollouts, 1 right, reward 0.350"):
            assert expected in text
    finally:
        shown.close()


def test_a_resumed_run_goes_on_at_its_step_with_its_mean_and_one_of_unknown_length_has_no_eta(tmp_path: Path):
    shown, buffer = display()
    shown.on_run_start(event=attrs.evolve(start(first_step=12), directory=write_run(tmp_path / "run", steps=11)))
    assert "run, 9 steps of training to do, resuming at step 12\n" in buffer.getvalue()
    assert "11 of 20 steps" in panel(shown)
    done, told = display()
    done.on_run_start(event=attrs.evolve(start(11, first_step=12), directory=tmp_path / "run"))
    assert told.getvalue().endswith("run, nothing left to train: step 11 of 11 is done\n")
    before = json.loads((tmp_path / "run" / "progress.json").read_text())["before"]["accuracy"]
    assert f"{100 * before:.1f}% before training" in panel(shown)
    rewards = [json.loads(line)["reward"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    shown.on_step_end(StepEnd(step=12, metrics={"reward": 0.25, "step_s": 1.0}))
    assert f"reward 0.250 (mean of 12: {(sum(rewards) + 0.25) / 12:.3f})" in buffer.getvalue()
    shown, buffer = display()
    shown.on_run_start(event=start(None))
    shown.on_step_end(event=StepEnd(step=3, metrics=METRICS))
    assert "step 3  reward" in buffer.getvalue()
    assert "eta" not in buffer.getvalue() + panel(shown)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyboardInterrupt(), "Ctrl-C"),
        (RunStopped("no triplets"), "an error"),
        (Interrupted(signal.SIGHUP, "ended early"), "SIGHUP"),
    ],
)
def test_an_error_closes_the_panel_and_names_the_last_step(error: BaseException, said: str):
    shown, buffer = display(terminal=True)
    shown.on_run_start(event=start())
    shown.on_step_end(event=StepEnd(step=3, metrics=METRICS))
    shown.on_run_error(event=RunError(directory=Path("runs/demo"), error=error))
    assert f"runs/demo: {said} ended the run (last whole step: 3)" in buffer.getvalue()
    assert buffer.getvalue().count("\x1b[?25l") == buffer.getvalue().count("\x1b[?25h") == 1  # the cursor is back


def test_a_second_signal_is_told_by_its_error_alone() -> None:
    shown, buffer = display()
    shown.on_run_start(event=start())
    shown.on_step_end(event=StepEnd(step=3, metrics=METRICS))
    lost = Interrupted(signal.SIGINT, "ended at once; step 3 was not saved", at_once=True)
    shown.on_run_error(event=RunError(directory=Path("runs/demo"), error=lost))
    assert "last whole step" not in buffer.getvalue()


def test_logs_go_above_the_panel_and_their_handlers_get_their_stream_back(monkeypatch: pytest.MonkeyPatch):
    error = io.StringIO()
    monkeypatch.setattr(sys, "stderr", error)
    handler = logging.StreamHandler()
    logging.getLogger().addHandler(handler)
    shown, buffer = display(terminal=True)
    try:
        shown.on_run_start(event=start())
        logging.getLogger("agentrig").error("a plugin is slow")
        assert "a plugin is slow" in buffer.getvalue()
        assert error.getvalue() == ""
        shown.close()
        logging.getLogger("agentrig").error("later")
        assert error.getvalue() == "later\n"
    finally:
        shown.close()
        logging.getLogger().removeHandler(handler)


def test_names_are_never_read_as_markup():
    shown, buffer = display()
    event = attrs.evolve(start(), directory=Path("runs/[red]x[/bold]"))
    shown.on_run_start(event=event)
    shown.on_run_error(event=RunError(directory=Path("[/x]"), error=SimpleNamespace()))  # type: ignore[arg-type]
    assert "runs/[red]x[/bold]" in buffer.getvalue()
    assert "[/x]" in buffer.getvalue()


def test_an_output_that_cannot_be_written_ends_the_display_and_not_the_run(caplog: pytest.LogCaptureFixture):
    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    for number, why in ((full, "No space left on device"), (writer, "nobody reads")):
        file = os.fdopen(number, "w")
        caplog.clear()
        shown = LiveDisplay(Console(file=file, width=110))
        shown.on_run_start(event=start())
        shown.on_step_end(event=StepEnd(step=3, metrics=METRICS))
        told = [record for record in caplog.records if "the output cannot be written" in record.getMessage()]
        assert len(told) == 1, caplog.text
        assert why in told[0].getMessage()
        assert not told[0].exc_info
        with contextlib.suppress(OSError):  # what could not be written
            file.close()


def test_a_damaged_reward_of_an_earlier_step_is_left_out_of_the_mean(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=2)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[0]["reward"] = {"a": 1}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown, buffer = display()
    shown.on_run_start(RunStart(directory=run, config={}, steps=20, first_step=3))
    shown.on_step_end(StepEnd(step=3, metrics={"reward": 0.25, "step_s": 1.0}))
    assert f"reward 0.250 (mean of 2: {(lines[1]['reward'] + 0.25) / 2:.3f})" in buffer.getvalue()


def test_a_measurement_says_of_how_many_rollouts_and_what_comes_after_the_last(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=2)
    facts = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps({**facts, "data": {"report": {"tasks": 3}}}))
    shown, buffer = display()
    shown.on_run_start(RunStart(directory=run, config={}, steps=20, first_step=1))
    for i in range(3):
        shown.on_rollout_end(rollout_of(i, right=i < 2, mode="report", step=2))
    last = buffer.getvalue().splitlines()[-1]
    assert last.startswith("measuring held-out accuracy after training: 3 of 3 rollouts, 2 right, reward")
    assert last.endswith("; now the last checks and the report, then the results")


def test_an_error_in_the_first_step_of_a_resumed_run_names_the_step_before(tmp_path: Path) -> None:
    shown, buffer = display()
    shown.on_run_start(RunStart(directory=write_run(tmp_path / "run", steps=2), config={}, steps=20, first_step=3))
    shown.on_run_error(RunError(directory=tmp_path / "run", error=RunStopped("no triplets")))
    assert buffer.getvalue().endswith("an error ended the run (last whole step: 2)\n")


def test_a_long_measurement_says_in_a_pipe_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, buffer = display()
    now = [time.monotonic()]
    monkeypatch.setattr("agentrig.view.live.time.monotonic", lambda: now[0])
    shown.on_run_start(event=start())
    for i in range(12):
        shown.on_rollout_end(rollout_of(i, right=i % 2 == 0, mode="report", step=0))
        now[0] += 6
    lines = [line for line in buffer.getvalue().splitlines() if line.startswith("measuring")]
    before = "measuring held-out accuracy before training"
    assert lines[:2] == [f"{before} (run.report_tasks limits it) …", f"{before}: 6 rollouts, 3 right, reward 0.500"]
    assert len(lines) == 3
