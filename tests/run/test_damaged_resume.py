"""A resume that fails leaves the whole run directory as it was, and a changed checkpoint is refused by name."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import agentrig_grpo.checkpoint
import pytest
import torch
from agentrig_grpo import trainer_files
from changed import change
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from agentrig import hookimpl
from agentrig.cli.entry import main
from agentrig.cli.options import find_checkpoint
from agentrig.delivery import exported
from agentrig.errors import AgentrigError, CheckpointDamaged, ConfigError, RunFileError, RunStopped
from agentrig.plan import resolve
from agentrig.run import checkpoints
from agentrig.run.auditing import checkpoint_fault
from agentrig.run.resume import resume_plan
from agentrig.run.training import train
from agentrig.testing.tiny_model import make_tiny_model
from agentrig.view.diagnosis import diagnose
from agentrig.view.figures import status
from agentrig.view.reading import read_run, rows_in

PLUGIN = Path(__file__).resolve().parents[1] / "support" / "letters_plugin.py"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three steps with a real learner; with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("letters")
    make_tiny_model(folder / "model")
    words = [
        f"run.directory={folder}", "run.name=run", 'run.block=["report"]', f"algorithm.model={folder / 'model'}",
        "algorithm.steps=3", "algorithm.save_every=1", "algorithm.keep_every=1", "algorithm.tasks_per_step=4",
        "run.report_tasks=4", "hardware.threads=1",
    ]  # fmt: skip
    train(resolve("letters", overrides=words, files=[str(PLUGIN)]))
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def whole(run: Path) -> Mapping[str, str]:
    """Return everything below a run directory: the mode and content of each entry; the lock's content is left out."""
    found = {}
    for path in sorted(run.rglob("*")):
        name, mode = str(path.relative_to(run)), oct(path.lstat().st_mode)
        if path.is_symlink():
            content = os.readlink(path)
        elif path.is_file() and name != "run.lock":
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            content = ""
        found[name] = f"{mode} {content}"
    return found


CHECKPOINT = "checkpoints/step-00003"
LEARNER = f"{CHECKPOINT}/trainer/learner.pt"
MODEL = f"{CHECKPOINT}/model.safetensors"

Damage = Callable[[Path], object]
"""Changes a run directory."""


def learner(*place: Any, becomes: Any) -> Damage:
    """Change what the last checkpoint has of the learner."""
    return lambda run: change(run, LEARNER, place, becomes)


def trained_as(becomes: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return learner("trained", becomes=lambda held: {name: becomes(tensor) for name, tensor in held.items()})


def gone(run: Path, name: str) -> None:
    shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink(missing_ok=True)


def a_folder_for(name: str) -> Damage:
    def damage(run: Path) -> None:
        gone(run, name)
        (run / name / "inside").mkdir(parents=True)

    return damage


def a_file_for_the_rollouts(run: Path) -> None:
    gone(run, "rollouts")
    (run / "rollouts").write_text("")


def flipped(*names: str) -> Damage:
    """Flip the bits of some bytes in the middle of files."""

    def damage(run: Path) -> None:
        for file in (file for name in names for file in run.glob(name)):
            data = bytearray(file.read_bytes())
            middle = len(data) // 2
            data[middle : middle + 64] = bytes(byte ^ 0xFF for byte in data[middle : middle + 64])
            file.write_bytes(data)

    return damage


def model_larger(run: Path) -> None:
    tensors = {name: tensor * 1.01 for name, tensor in load_file(str(run / MODEL)).items()}
    save_file(tensors, str(run / MODEL), metadata={"format": "pt"})


NOT_A_NUMBER = learner(becomes=lambda state: next(iter(state["trained"].values())).view(-1)[:3].fill_(float("nan")))

DAMAGES: Mapping[str, tuple[Damage, str]] = {
    "weights that are no number": (NOT_A_NUMBER, r"trainer/learner\.pt has changed since it was saved"),
    "a larger model": (model_larger, r"model\.safetensors has changed"),
    "a folder for the learner": (a_folder_for(LEARNER), r"trainer/learner\.pt is no file"),
    "no learner": (lambda run: gone(run, LEARNER), r"trainer/learner\.pt is missing"),
    "no list": (
        lambda run: gone(run, f"{CHECKPOINT}/{checkpoints.LIST}"), r"its list of files, \.files\.json, is missing",
    ),
    "a folder for the rollouts": (
        a_folder_for("rollouts/report-00003.parquet"), r"rollouts/report-00003\.parquet is a directory",
    ),
    "a folder for the summary": (a_folder_for("summary.json"), r"summary\.json cannot be read"),
    "a folder for the error": (a_folder_for("error.json"), r"error\.json is a directory"),
    "a folder for the progress": (a_folder_for("progress.json"), r"progress\.json cannot be read"),
    "a folder for latest": (a_folder_for("checkpoints/latest"), r"checkpoints/latest is a directory"),
    "a file for the rollouts": (a_file_for_the_rollouts, r"rollouts.*cannot be (read|written)"),
    "a list for the progress": (
        lambda run: (run / "progress.json").write_text('{"before": 3, "checkpoints": [1]}'),
        r"progress\.json is damaged",
    ),
    "no number of tasks": (
        lambda run: change(run, "progress.json", ("before",), {"accuracy": 0.5}),
        r"progress\.json is damaged: .*Restore it from a copy, or remove it",
    ),
    "words in the manifest": (
        lambda run: change(run, "manifest.json", (), lambda held: held.update(resumed=3, server="ours")),
        r"manifest\.json is damaged",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "wanted"), DAMAGES.values(), ids=DAMAGES)
def test_a_resume_that_fails_leaves_everything_as_it_was(run: Path, damage: Damage, wanted: str) -> None:
    damage(run)
    before = whole(run)
    done = CliRunner().invoke(main, ["train", "--resume", str(run), "algorithm.steps=4"])
    assert done.exit_code == 1, done.output
    assert isinstance(done.exception, SystemExit), "told without a traceback"
    assert whole(run) == before
    said = " ".join(done.stderr.split())
    assert re.search(wanted, said), said


@pytest.mark.slow
def test_a_link_with_a_later_steps_name_is_removed_as_a_link(run: Path) -> None:
    (run / "checkpoints" / "step-00009").symlink_to("step-00002")
    before = whole(run)
    done = CliRunner().invoke(main, ["train", "--resume", str(run), "--from-step", "9"])
    assert (done.exit_code, "step-00009 is damaged" in done.stderr, whole(run) == before) == (1, True, True), (
        done.output
    )
    with pytest.raises(CheckpointDamaged, match="step-00009 is damaged"):
        train(resume_plan(run, overrides=["algorithm.steps=4"]), resume=run)
    train(resume_plan(run, overrides=["algorithm.steps=4"]), resume=run, from_step=2)
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["latest", "step-00001", "step-00002", "step-00003", "step-00004"]
    assert whole(run)["checkpoints/step-00002/model.safetensors"] == before["checkpoints/step-00002/model.safetensors"]


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
def test_a_finished_result_stays_until_the_next_checkpoint(
    run: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    real = trainer_files.write

    def full(folder: Path, state: Mapping[str, Any]) -> None:
        real(folder, state)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(trainer_files, "write", full)
    before = whole(run)
    ended = [f"rollouts/report-0000{step}.parquet" for step in (0, 3)] + ["summary.json"]
    after = json.loads((run / "progress.json").read_text())["after"]
    with pytest.raises(RunFileError, match=r"step-00004 cannot be written: the disk is full.*is intact"):
        train(resume_plan(run, overrides=["algorithm.steps=4", "algorithm.keep_every=0"]), resume=run)
    now = whole(run)
    assert [now[name] for name in ended] == [before[name] for name in ended]
    assert {n: d for n, d in now.items() if "step-00003" in n} == {n: d for n, d in before.items() if "step-00003" in n}
    progress = json.loads((run / "progress.json").read_text())
    assert (progress["after"], "step-00004" in progress["checkpoints"]) == (after, False)
    assert [f for f in now if f.endswith(".part") or "step-00004" in f] == ["audit/step-00004.json"]
    if killed:  # then it could not write this
        (run / "error.json").unlink()
    shown = read_run(run)
    assert (status(shown), shown.summary["steps"]) == ("finished" if killed else "stopped by an error", 3)
    assert any("the run went on after step 3 and did not reach the next checkpoint" in m for m in shown.missing)
    assert not any("no step wrote" in m or "is not there" in m for m in shown.missing), shown.missing
    monkeypatch.setattr(trainer_files, "write", real)
    assert train(resume_plan(run), resume=run)["steps"] == 4
    assert not (run / ended[1]).exists()
    assert not (run / "checkpoints" / "step-00004" / "keep").exists(), "the last step's is kept like any other"
    assert not read_run(run).missing
    with pytest.raises(ConfigError, match="has ended after 4 steps"):
        resume_plan(run)


def half_a_config(run: Path) -> None:
    (run / "config.toml").write_text((run / "config.toml").read_text()[:-30] + "[")


def of_another_run(run: Path) -> None:
    change(run, "progress.json", ("checkpoints",), lambda held: {name: ["0" * 32] for name in held})


def one_of_another_run(run: Path) -> None:
    of_another_run(run)
    for step in (1, 2):
        shutil.rmtree(run / "checkpoints" / f"step-0000{step}", ignore_errors=True)


def all_of_another_run(run: Path) -> None:
    """The checkpoints are of another run than the manifest, and nothing else tells."""
    change(run, "manifest.json", ("id",), "0" * 32)
    for name in ("progress.json", "metrics.jsonl"):
        (run / name).unlink()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (all_of_another_run, r"manifest\.json records none of the checkpoints in.*are of another run.*from a copy"),
        (
            of_another_run,
            r"progress\.json records none of the checkpoints in.*are of another run.*from a copy",
        ),
        (one_of_another_run, r"progress\.json records none of the checkpoints in.*are of another run"),
        (
            flipped("checkpoints/step-0000[23]/model.safetensors"),
            r"step-00003 is damaged.*The last whole checkpoint before is \S+step-00001",
        ),
        (
            flipped("checkpoints/step-*/model.safetensors"),
            r"step-00003 is damaged.*No earlier checkpoint is whole; restore the file",
        ),
        (half_a_config, r"config\.toml is not TOML.*from the section config of manifest\.json"),
    ],
)
def test_a_cure_is_one_that_helps(run: Path, tmp_path: Path, damage: Damage, said: str) -> None:
    (run / "checkpoints" / "step-00001").mkdir(exist_ok=True)
    damage(run)
    before = whole(run)
    commands = [["train", "--resume", str(run), "algorithm.steps=4"]]
    if damage is not half_a_config:
        commands.append(["export", str(run), str(tmp_path / "model")])
    for words in commands:
        done = CliRunner().invoke(main, words)
        assert (done.exit_code, type(done.exception)) == (1, SystemExit), done.output
        assert re.search(said, " ".join(done.stderr.split())), done.stderr
    assert whole(run) == before


def without_permission(*words: str | Path) -> str:
    """Run a command as somebody who may not read everything; return what it printed, which is no traceback."""
    drop = ["setpriv", "--inh-caps=-all", "--bounding-set=-dac_override,-dac_read_search"] if not os.geteuid() else []
    if drop and not shutil.which("setpriv"):
        pytest.skip("root may read everything, and there is no setpriv")
    agentrig = str(Path(sys.executable).with_name("agentrig"))
    done = subprocess.run([*drop, agentrig, *map(str, words)], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return " ".join((done.stdout + done.stderr).split())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("checkpoints", "rollouts", "calls", "audit", "config.toml"),
        *("checkpoints/step-00003/model.safetensors", "calls/train-00003.parquet"),
    ],
)
def test_what_may_not_be_read_is_not_called_damaged(run: Path, tmp_path: Path, name: str) -> None:
    before, mode = whole(run), (run / name).stat().st_mode
    (run / name).chmod(0)
    try:
        told = [without_permission(word, run) for word in ("why", "report")]
        if name.startswith("checkpoints") or name == "progress.json":
            told[:0] = [without_permission("export", run, tmp_path / "model")]
        if name != "calls/train-00003.parquet":  # no resume reads it
            told[:0] = [without_permission("train", "--resume", run, "algorithm.steps=4")]
    finally:
        (run / name).chmod(mode)
    assert not (tmp_path / "model").exists()
    (run / "report.html").unlink(missing_ok=True)
    assert {n: d for n, d in whole(run).items() if not n.startswith("plots/")} == {
        n: d for n, d in before.items() if not n.startswith("plots/")
    }
    for said in told[:-2]:
        assert re.search(rf"{name}\S* cannot be read: Permission denied.*get permission to read it", said), said
        assert not re.search(r"Remove it|(?<!Nothing) is damaged", said), said
    if not name.startswith(("checkpoints/", "audit")):
        assert "ermission" in told[-2], told[-2]


def test_half_an_export_never_has_the_final_name(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def interrupted(folder: Path, checkpoint: Path) -> str:
        seen.append((tmp_path / "model").exists())
        # What torch leaves there goes with the folder.
        assert Path(tempfile.gettempdir()).name.startswith("agentrig-")
        assert os.environ["TMPDIR"] == tempfile.gettempdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(exported, "check_export", interrupted)
    assert CliRunner().invoke(main, ["export", str(run), str(tmp_path / "model")]).exit_code == 130
    assert seen == [False]
    assert [f.name for f in tmp_path.iterdir()] == ["run"]
    (tmp_path / ".model.part").mkdir()  # of an export that was killed
    assert CliRunner().invoke(main, ["export", "--no-check", str(run), str(tmp_path / "model")]).exit_code == 0
    assert sorted(f.name for f in tmp_path.iterdir()) == ["model", "run"]


def sealed(run: Path) -> None:
    """Write the last checkpoint's list of files and its digest again, as if the run had saved what is there now."""
    folder = run / CHECKPOINT
    files = [f for f in sorted(folder.rglob("*")) if f.is_file() and f.name not in (checkpoints.LIST, "keep")]
    listed = {str(f.relative_to(folder)): [f.stat().st_size, checkpoints.digest_of(f)] for f in files}
    (folder / checkpoints.LIST).write_text(json.dumps(listed))
    change(run, "progress.json", ("checkpoints", folder.name), [checkpoints.digest_of(folder / checkpoints.LIST)])


SAVED_WRONG: Mapping[str, tuple[Damage, str]] = {
    "weights that are no number": (NOT_A_NUMBER, r"learner\.pt holds NaN or infinite numbers in trained\."),
    "moments that are no number": (
        learner("optimizer", "state", 0, "exp_avg", slice(3), becomes=math.inf),
        r"learner\.pt holds NaN or infinite numbers in optimizer\.state\.0\.exp_avg",
    ),
    "larger weights": (
        trained_as(lambda tensor: tensor * 1.01),
        r"its weights are not those of the run after step 3 \(digests\.weights, metrics\.jsonl\)",
    ),
    "a moment of another shape": (
        learner("optimizer", "state", 0, "exp_avg", becomes=torch.zeros(3)),
        r"learner\.pt does not fit: the moment exp_avg of \S+ has the shape \[3\]",
    ),
    "no optimizer": (learner(becomes=lambda state: state.pop("optimizer")), r"learner\.pt lacks optimizer"),
    "another dtype": (trained_as(torch.Tensor.half), r"its weights are not those"),
    "other shapes": (trained_as(lambda tensor: tensor[:1]), r"learner\.pt does not fit: the moment"),
}


def test_the_manifest_says_which_file_brings_which_component(run: Path) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["component_files"].items() >= {"reward": str(PLUGIN), "agent": str(PLUGIN)}.items()
    assert manifest["files"] == {str(PLUGIN): hashlib.sha256(PLUGIN.read_bytes()).hexdigest()}


@pytest.mark.parametrize(("damage", "wanted"), SAVED_WRONG.values(), ids=SAVED_WRONG)
def test_a_checkpoint_that_was_wrong_when_it_was_saved_changes_nothing(run: Path, damage: Damage, wanted: str) -> None:
    damage(run)
    sealed(run)
    before = whole(run)
    with pytest.raises(AgentrigError, match=wanted):
        train(resume_plan(run, overrides=["algorithm.steps=4"]), resume=run)
    assert whole(run) == before


@pytest.mark.parametrize("step", [None, 1])
def test_the_metrics_of_another_run_are_named_and_no_checkpoint_is(run: Path, step: int | None) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:  # as another run with the same settings has them
        line["files"] = {kind: digest[::-1] for kind, digest in line["files"].items()}
        line["digests"]["weights"] = line["digests"]["weights"][::-1]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = whole(run)
    with pytest.raises(RunFileError, match=r"metrics\.jsonl is not this run's: none of the 6 files") as told:
        train(resume_plan(run, overrides=["algorithm.steps=4"], from_step=step), resume=run, from_step=step)
    assert "checkpoint" not in str(told.value)
    assert whole(run) == before
    data = read_run(run)
    assert (data.steps, data.ended) == ([], 3)
    assert [text for text in data.missing if "metrics.jsonl is not this run's" not in text] == []
    assert str(diagnose(data)).splitlines()[2:4] == ["Damaged files:", f"- {data.missing[0]}"]
    assert all(map(rows_in, data.files)), "its rollouts can be read"


@pytest.mark.slow
def test_a_first_transfer_that_fails_changes_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = agentrig_grpo.checkpoint.weights
    monkeypatch.setattr(agentrig_grpo.checkpoint, "weights", lambda model: {n: t * 1.5 for n, t in real(model).items()})
    before = whole(run)
    with pytest.raises(RunStopped, match="the weights of version 3 did not arrive"):
        train(resume_plan(run, overrides=["algorithm.steps=4"]), resume=run)
    assert whole(run) == before


@pytest.mark.parametrize("words", [["eval", "letters", f"--plugin={PLUGIN}", "--checkpoint"], ["export"]])
def test_a_changed_checkpoint_is_neither_measured_nor_exported(run: Path, tmp_path: Path, words: list[str]) -> None:
    model_larger(run)
    target = [str(tmp_path / "exported")] if words == ["export"] else []
    for place in (run, run / CHECKPOINT):
        done = CliRunner().invoke(main, [*words, str(place), *target])
        assert done.exit_code == 1, done.output
        assert "model.safetensors has changed since it was saved" in done.stderr
        assert "step-00002" in done.stderr or "--from-step 2" in done.stderr


def test_a_checkpoint_that_its_run_removes_while_it_is_measured_is_named(run: Path, tmp_path: Path) -> None:
    """A run that goes on keeps its last two; here the agent removes it, which is built before the server starts."""
    (tmp_path / "late.py").write_text(
        "import shutil\nfrom agentrig import AgentSpec, hookimpl\n\n\ndef build(config):\n"
        f"    shutil.rmtree({str(run / CHECKPOINT)!r})\n    return lambda task, endpoint: 'a'\n\n\n@hookimpl\n"
        "def register_agents():\n    yield AgentSpec(name='late', summary='Builds late.', build=build)\n"
    )
    words = ["letters", f"--plugin={PLUGIN}", "--plugin", str(tmp_path / "late.py"), "--agent=late", "runners.n=1"]
    done = CliRunner().invoke(main, ["eval", *words, "--checkpoint", str(run)])
    assert done.exit_code == 1, done.output
    assert f"{run / CHECKPOINT} was removed meanwhile: a run that goes on keeps only its last 2" in done.stderr
    assert f"Repeat the command with the run, {run}: it takes the latest." in done.stderr
    assert "algorithm.keep_every=N" in done.stderr


def test_the_optimizer_is_not_needed_to_measure_or_export(run: Path, tmp_path: Path) -> None:
    (run / LEARNER).write_bytes((run / LEARNER).read_bytes()[:-100])
    assert find_checkpoint(run) == run / CHECKPOINT
    done = CliRunner().invoke(main, ["export", str(run), str(tmp_path / "exported")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "exported" / "model.safetensors").read_bytes() == (run / MODEL).read_bytes()
    assert "it answers as the learner did" in done.stdout
    (warning,) = (line for line in done.stderr.splitlines() if "warning" in line)
    assert f"{run / CHECKPOINT}: trainer/learner.pt changed since it was saved. No training can resume" in warning
    told = checkpoint_fault(run / CHECKPOINT)
    assert re.match(r"step 3: the audit found a damaged file:\n  weights: .*learner\.pt cannot be read", told)
    flipped(MODEL)(run)
    with pytest.raises(CheckpointDamaged, match=r"step-00002; give its path: `eval` and `dev` take it with --checkp"):
        find_checkpoint(run)


def test_an_export_says_that_no_record_states_its_weights(run: Path, tmp_path: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:-1]))
    done = CliRunner().invoke(main, ["export", str(run), str(tmp_path / "exported")])
    assert done.exit_code == 0, done.output
    (warning,) = (line for line in done.stderr.splitlines() if "warning" in line)
    assert (
        f"it is unknown whether {run / CHECKPOINT} has the weights that the run made: metrics.jsonl has no" in warning
    )

    text = "".join(lines)  # of another run: it states other digests
    (run / "metrics.jsonl").write_text(re.sub(r"\b[0-9a-f]{64}\b", lambda found: found[0][::-1], text))
    done = CliRunner().invoke(main, ["export", str(run), str(tmp_path / "again")])
    assert done.exit_code == 0, done.output
    assert f"has the weights that the run made: {run}/metrics.jsonl is not this run's" in done.stderr


class StopMeasuring:
    """Sends this process a signal at the first rollout of the measurement before training."""

    sent = False

    @hookimpl
    def on_rollout_end(self, rollout: Any) -> None:
        if rollout.mode == "report" and not self.sent:
            self.sent = True
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_measurement_before_training_is_kept_by_a_run_that_ends_after_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "agentrig")
    make_tiny_model(tmp_path / "model")
    words = [
        f"run.directory={tmp_path}", "run.name=run", f"algorithm.model={tmp_path / 'model'}", "algorithm.steps=1",
        "algorithm.tasks_per_step=2", "algorithm.group_size=2", "algorithm.validate_every=1", "run.validation_tasks=2",
        "run.report_tasks=2", "run.audit=false",
    ]  # fmt: skip
    plan = resolve("letters", overrides=words, files=[str(PLUGIN)])
    plan.registry.add_observer(StopMeasuring(), "stop")
    with pytest.raises(KeyboardInterrupt, match="ended early; resume with: "):
        train(plan)
    run = tmp_path / "run"
    progress, file = json.loads((run / "progress.json").read_text()), run / "rollouts" / "report-00000.parquet"
    assert (progress.keys() & {"before", "start_weights", "validation_before"}) == {"before", "start_weights"}
    assert not any("validating on" in text or "next: the learner loads" in text for text in caplog.messages)
    measured = file.read_bytes()
    others = {name: shutil.copytree(run, tmp_path / name) for name in ("sampled", "weights")}

    summary = train(resume_plan(run), resume=run)
    assert file.read_bytes() == measured
    assert (summary["accuracy"]["before"], summary["accuracy"]["n"]) == (progress["before"]["accuracy"], 2)
    assert summary["rollouts"] == 2 + 2 + 2 * 2 + 2 + 2  # measured, validated, trained, validated, measured

    train(resume_plan(others["sampled"], overrides=["algorithm.val_temperature=0.7"]), resume=others["sampled"])
    model = {name: tensor + 0.1 for name, tensor in load_file(tmp_path / "model" / "model.safetensors").items()}
    save_file(model, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    train(resume_plan(others["weights"]), resume=others["weights"])
    for other in others.values():
        assert (other / "rollouts" / file.name).read_bytes() != measured
