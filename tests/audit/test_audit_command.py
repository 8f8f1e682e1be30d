"""`agentrig audit` reads a record only: a healthy one holds, and each changed part of it is named with its link."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import audited_runs
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from audited_runs import tiny_model, trained
from changed import Place, change
from click.testing import CliRunner
from quick import quick_first

from agentrig.audit.record import Record
from agentrig.audit.verdicts import LINKS
from agentrig.cli import main
from agentrig.run.resume import resume_plan
from agentrig.run.training import train
from agentrig.view.diagnosis import diagnose
from agentrig.view.figures import held_out, settings_of
from agentrig.view.reading import read_run


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("healthy")
    return trained(folder, tiny_model(folder), "algorithm.keep_every=1")


@pytest.fixture
def run(healthy: Path, tmp_path: Path) -> Path:
    """A copy, to be changed."""
    return Path(shutil.copytree(healthy, tmp_path / "run"))


def test_one_step_and_all_of_them_exclude_each_other(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["audit", str(tmp_path), "--step", "1", "--all"])
    assert (done.exit_code, "leave one of them out" in done.output) == (2, True), done.output


def audited(run: Path, *words: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return the exit status and the verdicts by link; of a link with several faults, the first."""
    done = CliRunner().invoke(main, ["audit", str(run), "--json", *words])
    found: dict[str, dict[str, Any]] = {}
    for each in json.loads(done.stdout)[-1]["verdicts"]:
        found.setdefault(each["link"], each)
    return done.exit_code, found


def test_a_healthy_record_holds_in_every_link_afterwards_too(healthy: Path) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in healthy.rglob("*"))
    done = CliRunner().invoke(main, ["audit", str(healthy), "--all"])
    assert done.exit_code == 0, done.output
    assert done.output.count(f"{len(LINKS)} of {len(LINKS)} parts compared") == 2, done.output
    assert done.stderr.startswith(f"{healthy}: reading it, and building its tasks and its reward again …\n")
    assert f"  step 2 (2 of 2): looking at its {LINKS[0]} …\n" in done.stderr
    assert done.output.count("; no fault of sampling shows. The nearest to one: ") == 2, done.output
    assert sorted((path, path.stat().st_mtime_ns) for path in healthy.rglob("*")) == before, "it only reads"


def test_a_stated_accuracy_without_its_file_is_not_ok(run: Path) -> None:
    (run / "rollouts" / "report-00000.parquet").unlink()
    found = audited(run, "--step", "2")[1]["held-out"]
    assert found["result"] != "ok"
    assert "report-00000.parquet" in found["detail"]


def test_a_record_holds_where_the_files_of_its_tasks_are_elsewhere(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUDIT_ROOT", "/another/cache")
    status, found = audited(run, "--step", "2")
    assert (status, {link: each["result"] for link, each in found.items()}) == (0, dict.fromkeys(LINKS, "ok")), found
    change(run, ROLLOUTS, (0, "root"), None)  # as of a task set that states none
    status, found = audited(run, "--step", "2")
    assert (status, found["tasks"]["result"]) == (1, "fault")
    assert "files in another folder than then, of a task or a record without `root`" in found["tasks"]["causes"]


def test_a_file_of_tasks_that_changed_since_the_run_began_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    lines = [f'{{"text": "word {n}", "gold": "a"}}\n' for n in range(80)]
    rows.write_text("".join(lines[:40]))
    monkeypatch.setitem(audited_runs.USES, "tasks", "table")
    keys = (f"tasks.file={rows}", 'tasks.private=["gold"]', "run.audit=false", "algorithm.steps=1")
    run = trained(tmp_path, tiny_model(tmp_path), *keys)
    rows.write_text("".join(lines))
    os.utime(rows, (2**31, 2**31))
    status, found = audited(run, "--step", "1")
    assert status == 1
    said = rf"{rows} \(tasks.file\) has changed since the run began \(\d+ train tasks then, \d+ now\)"
    assert re.fullmatch(said, found["tasks"]["detail"]), found
    assert found["tasks"]["causes"].endswith("Put it back as it was, or start a new run")
    assert "task_sampling" not in str(found)


def test_a_task_set_with_other_tasks_than_when_the_run_began_is_told(run: Path) -> None:
    change(run, "manifest.json", ("data", "train"), {"tasks": 5, "fingerprint": "of others"})
    assert audited(run)[0] == 0, "where all is as it should be, nothing is asked"
    change(run, ROLLOUTS, (0, "task_id"), "train-77")
    found = audited(run, "--step", "2")[1]["tasks"]
    said = "the task set, loaded again, has other tasks than when the run began (5 train tasks then, 6 now)"
    assert found["detail"] == said
    assert "put it back, or start a new run" in found["causes"]


@pytest.mark.parametrize(("first", "then"), [(2, 4), (4, 2)])
def test_a_resumed_run_may_measure_other_held_out_tasks_and_compares_those_of_both(
    tmp_path: Path, first: int, then: int
) -> None:
    both = [f"run.{mode}_tasks={first}" for mode in ("report", "validation")]
    run = trained(tmp_path, tiny_model(tmp_path), "algorithm.steps=1", "algorithm.validate_every=1", *both)
    words = [word.replace(f"={first}", f"={then}") for word in both]
    train(resume_plan(run, overrides=["algorithm.steps=2", *words]), resume=run)
    summary = json.loads((run / "summary.json").read_text())
    start, end = (pq.read_table(run / "rollouts" / f"report-0000{at}.parquet").to_pylist() for at in (0, 2))
    assert (len(start), len(end)) == (first, then)
    right = [[row["correct"] for row in rows if row["task_id"] in ("test-0", "test-1")] for rows in (start, end)]
    assert summary["accuracy"] == {"before": sum(right[0]) / 2, "after": sum(right[1]) / 2, "n": 2}
    said = f"{first} held-out tasks were measured before training, and {then} after it (run.report_tasks was changed, "
    said += "or the task set): both accuracies are of the 2 in both"
    assert said in summary["warnings"]
    assert said in " ".join(finding.text for finding in diagnose(read_run(run)).warnings)
    shown = held_out(read_run(run))["accuracy"]
    assert {key: shown[key] for key in summary["accuracy"]} == summary["accuracy"]
    done = CliRunner().invoke(main, ["audit", str(run), "--all"])
    assert done.exit_code == 0, done.output
    (compared,) = json.loads(CliRunner().invoke(main, ["compare", str(run), "--json"]).stdout)["runs"]
    assert compared["against_start"]["gain"] == (sum(right[1]) - sum(right[0])) / 2
    assert compared["against_start"]["n"] == 2

    change(run, "rollouts/report-00000.parquet", (), list.pop)
    status, found = audited(run)
    assert (status, found["held-out"]["result"]) == (1, "fault")
    change(run, "rollouts/report-00000.parquet", (0, "task_id"), "test-5")
    assert audited(run)[0] == 1


def test_each_step_is_judged_by_the_settings_that_held_when_it_was_made(run: Path, tmp_path: Path) -> None:
    """Also those of the update, of what was measured before training, and of the tasks and the reward."""
    others = ["algorithm.tasks_per_step=2", "algorithm.group_size=4", "algorithm.lr=3e-3", "algorithm.beta1=0.8"]
    others += ["algorithm.lr_scheduler_type=linear", "algorithm.val_temperature=0.5", "algorithm.max_tokens=6"]
    others += ["algorithm.task_sampling=by-difficulty", "credit.use=rloo", "run.seed=3", "run.train_tasks=4"]
    train(resume_plan(run, overrides=["algorithm.steps=4", "run.correct_at=0.5", *others]), resume=run)
    done = CliRunner().invoke(main, ["audit", str(run), "--all"])
    assert done.exit_code == 0, done.output
    changes = json.loads((run / "manifest.json").read_text())["changes"]
    assert [(each["after"], each["ended"]) for each in changes] == [(2, True)]
    assert changes[0]["config"]["algorithm"]["tasks_per_step"] == 3
    assert changes[0]["config"]["run"] == {"seed": 0, "train_tasks": 0, "correct_at": None}
    assert changes[0]["components"]["credit"]["name"] == "grpo"
    told = str(diagnose(read_run(run)))
    assert "went on with other settings after step 2: " in told
    assert "algorithm.lr = 0.003 (was 0.001)" in told
    settings = settings_of(read_run(run))  # as `compare` and the report show them
    assert (settings["algorithm.lr"], settings["algorithm.steps"]) == ("0.001 up to step 2, then 0.003", 4)

    # What an earlier resume changed holds from the step on that a later one goes back to.
    train(resume_plan(run, overrides=["algorithm.lr=1e-4"], from_step=1), resume=run, from_step=1)
    changes = json.loads((run / "manifest.json").read_text())["changes"]
    assert [(each["after"], each["ended"], each["config"]["algorithm"]["lr"]) for each in changes] == [
        (1, False, 1e-3), (1, False, 3e-3),
    ]  # fmt: skip
    done = CliRunner().invoke(main, ["audit", str(run), "--all"])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("name", ["calls/train-0000{}.parquet", "rollouts/train-0000{}.parquet"])
def test_another_steps_file_in_a_files_place_is_called_a_changed_file(run: Path, name: str) -> None:
    shutil.copy(run / name.format(1), run / name.format(2))
    status, found = audited(run, "--step", "2")
    wrong = {link: each["detail"] for link, each in found.items() if each["result"] == "fault"}
    said = f"{run / name.format(2)} was changed since the run wrote it: restore it from a copy"
    assert (status, set(wrong.values())) == (1, {said})
    assert found["advantages"]["causes"] == "a file of the run that was cut short or changed since"


@pytest.mark.parametrize("name", ["model.safetensors", "trainer/learner.pt"])
def test_a_flipped_bit_of_a_checkpoint_is_no_fault_of_its_writer(run: Path, name: str) -> None:
    file = run / "checkpoints" / "step-00002" / name
    content = bytearray(file.read_bytes())
    at = len(content) // 8 if name.endswith("pt") else len(content) - 1
    content[at] ^= 64
    file.write_bytes(content)
    status, found = audited(run, "--step", "2")
    wrong = [each for each in found.values() if each["result"] == "fault"]
    assert status == 1
    assert wrong
    for each in wrong:
        assert str(file) in each["detail"] + each["causes"], each
        assert "how it is written" not in each["causes"]


@pytest.mark.parametrize("name", ["progress.json", "summary.json"])
def test_an_accuracy_that_was_edited_is_called_a_changed_file(run: Path, name: str) -> None:
    change(run, name, ("after", "accuracy") if name == "progress.json" else ("accuracy", "after"), 0.123)
    status, found = audited(run, "--step", "2")
    assert (status, found["held-out"]["result"]) == (1, "fault")
    assert f"{name} states the accuracy 0.1230 of the report of step 2" in found["held-out"]["detail"]
    assert found["held-out"]["causes"].startswith(f"{name} was changed since the run wrote it, or")


def swap_rewards(rows: list[dict[str, Any]]) -> None:
    other = next(i for i, row in enumerate(rows) if row["value"] != rows[0]["value"])
    rows[0]["value"], rows[other]["value"] = rows[other]["value"], rows[0]["value"]


def shorter(calls: list[dict[str, Any]]) -> None:
    for call in calls:
        call["request"]["max_tokens"] = 5


ROLLOUTS, CALLS, SKETCH = "rollouts/train-00002.parquet", "calls/train-00002.parquet", "audit/step-00002.json"
START, END = "rollouts/report-00000.parquet", "rollouts/report-00002.parquet"
TENSOR = "model.layers.1.mlp.up_proj.weight"
SEEN = "updates", 0, "tensors", TENSOR

CHANGES: dict[str, tuple[str, str, Place, Any]] = {
    "a task of another step": ("tasks", ROLLOUTS, (0, "task_id"), "train-9"),
    "another input": ("tasks", ROLLOUTS, (0, "input"), '{"text": "other"}'),
    "another text": (
        "text", ROLLOUTS, ("calls", 3, "response", "choices", 0, "message", "content"), lambda text: f"{text}!"
    ),
    "other messages": ("text", ROLLOUTS, ("calls", 3, "request", "messages", 0, "content"), "another question"),
    "a log-probability": ("distribution", ROLLOUTS, ("calls", 3, "response_logprobs", 0), lambda value: value - 1e-3),
    "two rewards": ("score", ROLLOUTS, (), swap_rewards),
    "an advantage": ("advantages", CALLS, (0, "advantage"), 0.7),
    "a gradient's size": ("gradient", SKETCH, (*SEEN, "gradient"), lambda sums: [one * 1.01 for one in sums]),
    "a gradient's sign": ("gradient", SKETCH, (*SEEN, "gradient"), lambda sums: [-one for one in sums]),
    "moments": ("weights", SKETCH, (*SEEN, "means"), lambda means: [0.0] * len(means)),
    "NaN in one of a tensor's weights": ("weights", SKETCH, ("updates", -1, "tensors", TENSOR, "after", 3), math.nan),
    "NaN in one of a gradient's projections": ("gradient", SKETCH, (*SEEN, "gradient", 3), math.nan),
    "weights that give NaN": (
        "distribution", "checkpoints/step-00001/trainer/learner.pt", ("trained", TENSOR, (3, 3)), math.nan
    ),
    "NaN as the learning rate": ("weights", "metrics.jsonl", (1, "algorithm", "lr"), math.nan),
    "NaN as what the answer differs by": ("delivery", "metrics.jsonl", (1, "delivery", "difference"), math.nan),
    "a bound of infinity for the server's answer": ("delivery", "metrics.jsonl", (1, "delivery", "bound"), math.inf),
    "a warm measurement": ("held-out", END, ("calls", 0, "request", "temperature"), 0.7),
    "other requests before training": ("held-out", START, ("calls",), shorter),
    "the score of a call": ("score", ROLLOUTS, (0, "call_values"), "[0.987]"),
    "NaN as the stated accuracy": ("held-out", "progress.json", ("after", "accuracy"), math.nan),
}  # fmt: skip


QUICK = (
    *("a task of another step", "another text", "a log-probability", "two rewards", "an advantage"),
    *("a gradient's size", "moments", "NaN as what the answer differs by", "a warm measurement"),
)
"""One for each link."""


@pytest.mark.parametrize("name", quick_first(CHANGES, QUICK))
def test_a_changed_record_is_named_with_its_link(name: str, run: Path) -> None:
    link, *what = CHANGES[name]
    change(run, *what)
    status, found = audited(run, "--step", "2")
    assert status == 1
    assert found[link]["result"] == "fault", found
    assert found[link]["causes"]


def test_log_probabilities_that_are_not_one_for_each_token_are_named_and_make_no_traceback(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def shortened(calls: list[dict[str, Any]]) -> None:
        for call in calls:
            del call["response_logprobs"][1:]

    change(run, ROLLOUTS, ("calls",), shortened)
    status, found = audited(run, "--step", "2")
    assert (status, found["distribution"]["result"], found["gradient"]["result"]) == (1, "fault", "not looked at"), (
        found
    )
    assert "another number of log-probabilities than of tokens" in found["gradient"]["detail"]
    assert not [record for record in caplog.records if record.exc_info]


def test_a_changed_setting_is_named_with_its_link(run: Path) -> None:
    text = (run / "config.toml").read_text()
    assert "lr = 0.001" in text
    (run / "config.toml").write_text(text.replace("lr = 0.001", "lr = 0.002"))
    status, found = audited(run, "--step", "2")
    assert (status, found["weights"]["result"]) == (1, "fault"), found


def test_a_changed_reward_in_the_metrics_is_named(run: Path) -> None:
    change(run, "metrics.jsonl", (1, "reward"), lambda reward: reward + 0.25)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    done = CliRunner().invoke(main, ["audit", str(run), "--step", "2"])
    assert done.exit_code == 1, done.output
    assert "metrics.jsonl has the reward" in done.output
    assert "metrics.jsonl: line 3 cannot be read" in done.stderr


@pytest.mark.parametrize(
    ("name", "bytes_left", "link"),
    [
        ("rollouts/train-00002.parquet", 2000, "score"),
        ("calls/train-00002.parquet", 0, "advantages"),
        ("checkpoints/step-00001/trainer/learner.pt", 2000, "distribution"),
        ("progress.json", 20, "held-out"),
    ],
)
def test_a_file_that_was_cut_short_is_a_fault_that_names_it(
    run: Path, name: str, bytes_left: int, link: str, caplog: pytest.LogCaptureFixture
) -> None:
    (run / name).write_bytes((run / name).read_bytes()[:bytes_left])
    status, found = audited(run, "--step", "2")
    assert (status, found[link]["result"]) == (1, "fault"), found
    assert f"{name} cannot be read" in found[link]["detail"]
    assert not [record for record in caplog.records if record.exc_info]


def test_a_file_of_a_step_that_is_gone_is_a_fault_that_names_it(run: Path) -> None:
    (run / "calls/train-00002.parquet").unlink()
    status, found = audited(run, "--step", "2")
    wrong = {link: each["detail"] for link, each in found.items() if each["result"] == "fault"}
    said = f"{run}/calls/train-00002.parquet is gone, and the run wrote it: restore it from a copy"
    assert (status, wrong) == (1, dict.fromkeys(("score", "advantages", "gradient"), said))


def test_another_file_in_the_place_of_the_learners_gets_no_advice_of_torchs(run: Path) -> None:
    file = run / "checkpoints/step-00001/trainer/learner.pt"
    size = file.stat().st_size
    file.write_bytes(pickle.dumps({"trained": Path("x")}))
    _, found = audited(run, "--step", "2")
    assert found["distribution"]["result"] == "fault"
    said = (
        rf"learner\.pt cannot be read: it is not what the run saved \({file.stat().st_size} bytes; {size} were saved\)$"
    )
    assert re.search(said, found["distribution"]["detail"]), found["distribution"]


def test_the_model_of_another_run_ends_the_command(run: Path) -> None:
    text = (run / "config.toml").read_text()
    model = Record(run).settings["model"]
    (run / "config.toml").write_text(text.replace(f'model = "{model}"', 'model = "starter"'))
    done = CliRunner().invoke(main, ["audit", str(run), "--all"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"config.toml was edited: algorithm.model is 'starter', and the run had {model!r}. Write" in done.stderr


@pytest.mark.parametrize(
    ("name", "columns", "said"),
    [
        ("calls/train-00002.parquet", {"z": [1]}, "it has no column rollout"),
        ("calls/train-00002.parquet", {"advantage": ["much"]}, "much"),
        ("rollouts/train-00002.parquet", {"z": [1]}, "cannot be read"),
    ],
)
def test_a_file_with_other_columns_or_types_is_a_fault_that_names_it(
    run: Path, name: str, columns: dict[str, list[Any]], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    table = pq.read_table(run / name)
    for column, values in columns.items():
        if column in table.column_names:
            table = table.set_column(table.column_names.index(column), column, pa.array(values * len(table)))
        else:
            table = pa.table(columns)
    pq.write_table(table, run / name)
    status, found = audited(run, "--step", "2")
    assert (status, found["advantages"]["result"]) == (1, "fault"), found
    assert f"{name} cannot be read" in found["advantages"]["detail"]
    assert said in found["advantages"]["detail"]
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(("name", "text"), [("config.toml", "[run\n"), ("audit/step-00002.json", "{")])
def test_a_record_that_cannot_be_read_ends_the_command_with_the_file(run: Path, name: str, text: str) -> None:
    (run / name).write_text(text)
    done = CliRunner().invoke(main, ["audit", str(run), "--step", "2"])
    assert done.exit_code == 2, done.output
    assert re.search(rf"{name} (is not TOML|cannot be read)", done.stderr), done.stderr


@pytest.mark.parametrize(
    "place",
    [(), ("updates", 0, "tensors", TENSOR)],
    ids=["no updates", "no numbers"],
)
def test_a_sketch_with_values_of_other_types_is_named_and_not_looked_at(
    run: Path, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    def emptied(held: dict[str, Any]) -> dict[str, Any]:
        held.update(dict.fromkeys(held))
        return held

    change(run, "audit/step-00001.json", place, emptied)
    _, found = audited(run, "--step", "1")
    for link in ("gradient", "weights"):
        assert found[link]["result"] == "not looked at"
        assert found[link]["detail"].startswith("audit/step-00001.json is damaged: ")
    assert not [record for record in caplog.records if record.exc_info]


def test_a_file_in_the_place_of_the_folder_is_not_called_a_missing_sketch(run: Path) -> None:
    shutil.rmtree(run / "audit")
    (run / "audit").write_text("")
    done = CliRunner().invoke(main, ["audit", str(run), "--step", "2"])
    assert done.exit_code == 2, done.output
    assert re.search(r"audit cannot be read: Not a directory\. Restore it, or move it away", done.stderr), done.stderr
    assert any("audit cannot be read: Not a directory" in each for each in read_run(run).missing)


@pytest.mark.parametrize(("text", "said"), [("", "it is empty"), ("[run", "Expected")])
def test_a_model_is_not_exported_from_a_run_whose_settings_cannot_be_read(
    run: Path, tmp_path: Path, text: str, said: str
) -> None:
    (run / "config.toml").write_text(text)
    done = CliRunner().invoke(main, ["export", str(run), str(tmp_path / "model")])
    assert (done.exit_code, type(done.exception)) == (1, SystemExit), done.exception
    assert f"config.toml cannot be read: {said}" in done.stderr
    assert "Restore it from a copy" in done.stderr


def test_figures_of_another_type_are_named_without_a_traceback(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = map(json.loads, (run / "metrics.jsonl").read_text().splitlines()[:2])
    for damaged, lines in (("1", [{**first, "algorithm": 3}, second]), ("2", [first, {**second, "algorithm": 3}])):
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        done = CliRunner().invoke(main, ["audit", str(run), "--step", "2", "--json"])
        found = {each["link"]: each for each in json.loads(done.stdout)[0]["verdicts"]}
        said = f"the line of step {damaged} is damaged" if damaged == "1" else "in the line of step 2, algorithm is 3"
        assert said in found["gradient"]["detail"]
        assert found["gradient"]["result"] == ("not looked at" if damaged == "1" else "fault")
        assert not [record for record in caplog.records if record.exc_info]
        assert f"algorithm is no object for step {damaged}" in done.stderr
        assert any(f"algorithm is no object for step {damaged}" in each for each in read_run(run).missing)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (first, {**second, "digests": 7})))
    done = CliRunner().invoke(main, ["audit", str(run), "--step", "2", "--json"])
    assert "in the line of step 2, digests is 7" in done.stdout
    assert not [record for record in caplog.records if record.exc_info]


def test_links_that_cannot_be_looked_at_are_named_and_are_no_fault(run: Path) -> None:
    (run / "audit/step-00002.json").unlink()
    shutil.rmtree(run / "checkpoints/step-00001")
    status, found = audited(run, "--step", "2")
    assert status == 0
    unseen = {link: each["detail"] for link, each in found.items() if each["result"] == "not looked at"}
    assert unseen == {
        "distribution": "the weights of version 1 were not kept",
        "gradient": "the learner left no sketch of this step",
        "weights": "the learner left no sketch of this step",
    }


def test_lost_metrics_are_not_called_a_run_without_a_step(run: Path) -> None:
    (run / "metrics.jsonl").write_text("")
    done = CliRunner().invoke(main, ["audit", str(run)])
    assert "metrics.jsonl has no step, so none can be compared. Restore it from a copy" in done.stderr
    assert "has no line for steps 1" in done.stderr


def test_a_step_that_is_not_there_is_an_error(healthy: Path) -> None:
    done = CliRunner().invoke(main, ["audit", str(healthy), "--step", "7"])
    assert done.exit_code == 2
    assert "has no step 7; it has [1, 2]" in done.output


def test_the_report_ends_with_what_was_audited(healthy: Path) -> None:
    done = CliRunner().invoke(main, ["why", str(healthy)])
    said = f"the auditor recomputed {len(LINKS)} of {len(LINKS)} parts of steps 1, 2"
    assert done.output.splitlines()[-1].startswith(said), done.output
    summary = json.loads((healthy / "summary.json").read_text())
    assert summary["audited"]["steps"] == [1, 2]
    assert summary["audited"]["faults"] == []


def test_a_checkpoint_of_a_run_with_a_fault_is_warned_of(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As far as each command gets without a step: `export` copies, the others end at a wrong setting or split."""

    def warned(*words: str) -> bool:
        caplog.clear()
        done = CliRunner().invoke(main, list(words))
        said = f"{done.output}{caplog.text}"
        return f"the audit of {run} found a fault, so its model may not be what it states: step 2, held-out: no" in said

    commands = (
        ("export", str(run), str(run.parent / "model"), "--no-check"),
        ("train", "mini", "--start", str(run), "algorithm.none=1"),
        ("train", "--resume", str(run), "algorithm.none=1"),
        ("train", "--resume", str(run), "algorithm.steps=2"),
        ("eval", "mini", "--checkpoint", str(run / "checkpoints" / "step-00001"), "--split", "none"),
    )
    assert not any(warned(*words) for words in commands)
    shutil.rmtree(run.parent / "model")

    change(run, "audit/verdicts-00002.json", ("verdicts", -1), lambda told: {**told, "result": "fault", "detail": "no"})
    assert [warned(*words) for words in commands] == [True, True, False, True, True]
