"""The run directory: atomic files and checkpoints, and a rewind that removes later steps."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.json
import pyarrow.parquet as pq
import pytest
from rollouts import rollout, trace_of

from agentrig import Task, Triplet
from agentrig.errors import ConfigError, RunFileError, RunInUse
from agentrig.plan import Plan, resolve
from agentrig.processes.ends import Interrupted
from agentrig.run.directory import RunDirectory
from agentrig.run.manifest import manifest, manifest_changes
from agentrig.run.training import train


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def write(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "model").write_text(text) and None


def test_a_run_has_its_configuration_and_is_not_overwritten(toy_plan: Callable[..., Plan]) -> None:
    plan = toy_plan()
    created = RunDirectory.create(plan)
    assert created.path.name == "toy"
    assert 'use = "toy-number"' in (created.path / "config.toml").read_text()
    with pytest.raises(RunInUse, match="a run is active in"):
        RunDirectory.create(plan)
    created.append_metrics({"step": 1})
    created.release()
    with pytest.raises(ConfigError, match=r"toy already has a run; set another run.name, or continue it with --resume"):
        RunDirectory.create(plan)
    assert RunDirectory.create(toy_plan("run.name=''")).path.name.startswith("toy-20")


def test_a_run_that_ended_before_its_first_step_is_replaced(
    toy_plan: Callable[..., Plan], caplog: pytest.LogCaptureFixture
) -> None:
    failed = RunDirectory.create(toy_plan("run.seed=1"))
    failed.write_json("error.json", {"error": "RunStopped", "message": "step 1: nothing matched\n  more"})
    failed.write("rollouts/report-00000.parquet", "measured before")
    failed.write("notes.txt", "of the user")
    failed.release()
    with caplog.at_level("INFO"):
        again = RunDirectory.create(toy_plan("run.seed=2"))
    assert again.path == failed.path
    said = f"the run in {failed.path} ended before its first step and is replaced: step 1: nothing matched"
    assert said in caplog.messages
    assert "seed = 2" in (again.path / "config.toml").read_text()
    assert sorted(f.name for f in again.path.rglob("*") if f.is_file()) == ["config.toml", "notes.txt", "run.lock"]


@pytest.mark.parametrize("kept", ["summary.json", "checkpoints/step-00001", "rollouts/train-00001.parquet"])
def test_a_run_with_anything_of_a_step_is_never_replaced(toy_plan: Callable[..., Plan], kept: str) -> None:
    run = RunDirectory.create(toy_plan())
    run.write_json("error.json", {"message": "late"})
    run.write(kept, "result")
    run.release()
    with pytest.raises(ConfigError, match="already has a run"):
        RunDirectory.create(toy_plan())
    assert (run.path / kept).read_text() == "result"


def test_metrics_with_half_a_character_are_json_for_every_reader(run: RunDirectory) -> None:
    run.append_metrics({"step": 1, "reward_parts": {"half \udfff": 0.5}})
    assert pyarrow.json.read_json(run.path / "metrics.jsonl")["reward_parts"].to_pylist() == [{"half \ufffd": 0.5}]


def test_the_latest_two_checkpoints_and_the_kept_ones_stay(run: RunDirectory) -> None:
    for step in range(1, 7):
        run.checkpoints.save(step, write(str(step)), keep=step == 2)
    names = sorted(c.name for c in (run.path / "checkpoints").iterdir())
    assert names == ["latest", "step-00002", "step-00005", "step-00006"]
    path, step = run.checkpoints.latest()
    assert path is not None
    assert (path.name, step, (path / "model").read_text()) == ("step-00006", 6, "6")


def test_a_failed_checkpoint_keeps_the_previous_one(run: RunDirectory) -> None:
    run.checkpoints.save(1, write("one"), keep=False)

    def fail(folder: Path) -> None:
        (folder / "model").write_text("half")
        raise OSError("disk full")

    for step in (1, 2):
        with pytest.raises(RunFileError, match="disk full"):
            run.checkpoints.save(step, fail, keep=False)
        assert sorted(file.name for file in run.checkpoints.folder.iterdir()) == ["latest", "step-00001"]
    path, step = run.checkpoints.latest()
    assert path is not None
    assert (step, (path / "model").read_text()) == (1, "one")
    run.checkpoints.save(2, write("two"), keep=False)
    assert run.checkpoints.latest()[1] == 2


def test_a_checkpoint_may_be_saved_again(run: RunDirectory) -> None:
    for text in ("first", "second"):
        run.checkpoints.save(3, write(text), keep=True)
    path, _ = run.checkpoints.latest()
    assert path is not None
    assert (path / "model").read_text() == "second"
    assert sorted(c.name for c in (run.path / "checkpoints").iterdir()) == ["latest", "step-00003"]


def test_rollout_files_can_be_read_by_pandas_and_have_no_private_data(run: RunDirectory) -> None:
    triplets = [Triplet(prompt_ids=(1, 2, 3), response_ids=(4, 5), node="write")] * 2
    failed = rollout(failure="deadline", message="too slow", trace=trace_of())
    run.write_rollouts([rollout(0.5, triplets=triplets), failed, rollout(None)], mode="train", step=7)
    file = run.path / "rollouts" / "train-00007.parquet"
    first, second, third = pq.read_table(file).to_pylist()
    assert (first["value"], first["failure"], first["status"]) == (0.5, None, "ok")
    assert (first["triplets"], first["prompt_tokens"], first["response_tokens"], first["calls"]) == (2, 6, 4, 1)
    assert json.loads(first["input"]) == {"question": "?"}
    assert json.loads(first["answer"]) == "SELECT 1"
    (call,) = [s for s in json.loads(first["spans"]) if s["name"] == "openai.chat.completion"]
    assert call["attributes"]["response_token_ids"] == [3]
    assert (second["value"], second["failure"], second["message"]) == (None, "deadline", "too slow")
    assert json.loads(second["answer"]) is None
    assert (third["value"], third["failure"], third["status"]) == (None, "reward-invalid", "invalid")
    assert b"gold" not in file.read_bytes()


def test_the_manifest_is_complete(toy_plan: Callable[..., Plan]) -> None:
    plan = toy_plan("run.seed=11")
    tasks = plan.build("tasks").load("train")
    facts = manifest(plan, plan.build("hardware"), {"train": ("train", tasks)})
    assert facts["seed"] == 11
    assert facts["config"] == plan.as_dict()
    assert facts["components"]["algorithm"] == {"name": "toy-number", "distribution": "file", "version": "-"}
    assert {"name": "core", "distribution": "agentrig", "status": "ok"}.items() <= facts["plugins"][0].items()
    assert facts["data"]["train"]["tasks"] == 24
    assert len(facts["data"]["train"]["fingerprint"]) == 64
    assert facts["hardware"]["name"] == "cpu"
    assert "agentlightning" in facts["packages"]
    json.dumps(facts)


def test_a_resumed_run_reports_what_has_changed(tmp_path: Path, toy_file: str) -> None:
    file = tmp_path / "own.py"
    late = "\ndef late():\n    import json\n    from parts.half import of\n"
    file.write_text(Path(toy_file).read_text() + late)
    (tmp_path / "parts").mkdir()
    half, *beside = (tmp_path / name for name in ("parts/half.py", "parts/__init__.py", "parts/sums.py", "json.py"))
    for each in (half, *beside):
        each.write_text("from .sums import add\n" if each == half else "")
    plan = resolve("toy", files=[str(file)])

    def facts(*tasks: Task) -> dict[str, Any]:
        return manifest(plan, plan.build("hardware"), {"train": ("train", tasks)})

    before = facts(Task(id="a", input={}))
    assert before["files"].keys() == {str(each) for each in (file, half, *beside[:2])}, "no other module beside it"
    for each in (file, beside[1]):
        each.write_text(each.read_text() + "# half the reward\n")
    after = facts(Task(id="b", input={}))
    assert manifest_changes(before, before) == []
    after["components"]["reward"]["version"] = "2"
    after["hardware"] = {"name": "cuda"}
    assert manifest_changes(before, after) == [
        "the train tasks (split train) have changed since this run started",
        "reward toy-parity is 2 now; this run started with -",
        f"the file {file} has changed since this run started",
        f"the file {beside[1]} has changed since this run started",
        "this run started on cpu and continues on cuda",
    ]
    assert manifest_changes({}, after) == []


def test_a_resume_with_other_tasks_says_which_setting_asks_for_them(toy_plan: Callable[..., Plan]) -> None:
    def facts(n: int, *settings: str) -> dict[str, Any]:
        plan = toy_plan(*settings)
        tasks = [Task(id=str(i), input={"i": i}) for i in range(n)]
        return manifest(plan, plan.build("hardware"), {"report": ("test", tasks)})

    changed = "the report tasks (split test) have changed since this run started"
    before = facts(8, "run.report_tasks=8")
    assert manifest_changes(before, facts(4, "run.report_tasks=4")) == [
        f"{changed}: run.report_tasks is 4 now and was 8"
    ]
    assert manifest_changes(before, facts(4, "run.report_tasks=4", 'run.report="test"')) == [
        f"{changed}: run.report is 'test' now and was ''; run.report_tasks is 4 now and was 8"
    ]
    assert manifest_changes(before, facts(7, "run.report_tasks=8")) == [changed]


@pytest.mark.parametrize("at", ["_make_folders", "lock", "write_json", "starting"])
def test_a_signal_in_the_start_leaves_no_directory(
    toy_plan: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    def signalled(*given: Any) -> None:
        raise Interrupted(signal.SIGINT, "interrupted by Ctrl-C")

    def after(real: Callable[..., None]) -> Callable[..., None]:
        return lambda *given: (real(*given), signalled())[1]

    if at != "starting":
        monkeypatch.setattr(RunDirectory, at, after(getattr(RunDirectory, at)))
    with pytest.raises(Interrupted):
        train(toy_plan(), starting=signalled)
    assert not (tmp_path / "runs").exists()
