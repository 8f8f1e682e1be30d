"""Replaying a stored step: what is compared, what may be missing, and that the replay has no side effect."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from model_server import ModelServer

from agentrig import hookimpl
from agentrig.cli.entry import main
from agentrig.errors import AgentrigError, CheckpointDamaged, ConfigError, RunFileError
from agentrig.plan import resolve
from agentrig.run.replay import Replay, replay
from agentrig.run.resume import recorded_plan
from agentrig.run.training import train


@pytest.fixture(scope="module")
def recorded(_served: ModelServer, tmp_path_factory: pytest.TempPathFactory, toy_file: str) -> Path:
    """A finished run of three steps; one rollout of each task whose number is divisible by 3 has failed."""
    folder = tmp_path_factory.mktemp("recorded")
    own = [f"algorithm.endpoint={_served.url}", f"run.directory={folder}", "run.name=toy", "algorithm.steps=3"]
    failing = ['tasks.do=["typed", "", ""]', "run.failure_limit=0.5", 'run.block=["report"]']
    train(resolve("toy", overrides=[*own, *failing], files=[toy_file]))
    return folder / "toy"


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be changed."""
    shutil.copytree(recorded, tmp_path / "toy")
    return tmp_path / "toy"


def repeated(run: Path, *overrides: str, step: int = 2, **more: bool) -> Replay:
    return replay(recorded_plan(run, overrides=overrides), run, step, **more)


def results(found: Replay) -> dict[str, str]:
    return {stage.name: stage.result for stage in found.stages}


def detail(found: Replay, name: str) -> str:
    return next(stage.detail for stage in found.stages if stage.name == name)


def content(run: Path) -> dict[str, bytes]:
    return {str(f.relative_to(run)): f.read_bytes() for f in run.rglob("*") if f.is_file()}


def change_rows(run: Path, step: int, change: Callable[[list[dict[str, Any]]], None]) -> None:
    file = run / "rollouts" / f"train-{step:05d}.parquet"
    table = pq.read_table(file)
    rows = table.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), file)


def change_lines(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        change(line)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_step_is_repeated_from_its_record_and_nothing_else_changes(run: Path, model: ModelServer) -> None:
    before = content(run)
    model.requests.clear()
    for step in (1, 3):
        found = repeated(run, step=step, rescore=True)
        assert found.first_difference is None, found
        same = {"rescore", "tasks", "rewards", "triplets", "figures"}
        assert {name for name, result in results(found).items() if result == "ok"} == same
        assert found.start == (run / "checkpoints" / "step-00002" if step == 3 else None)
    assert detail(found, "tasks") == "6 tasks, 12 rollouts"
    assert model.requests == [], "no agent has run"
    assert content(run) == before


def test_a_failed_rollout_stays_failed(run: Path) -> None:
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert line["failures"] == {"no-plan": 4}
    found = repeated(run, step=1)
    assert results(found)["rewards"] == "ok"
    assert detail(found, "triplets").startswith("8 calls")


def test_a_replay_calls_no_observer(run: Path) -> None:
    class Watch:
        told: list[str] = []  # noqa: RUF012

        @hookimpl
        def on_run_start(self, event: Any) -> None:
            self.told.append("start")

        @hookimpl
        def on_step_end(self, event: Any) -> None:
            self.told.append("step")

    plan = recorded_plan(run)
    plan.registry.add_observer(Watch(), "watch")
    assert replay(plan, run, 3).first_difference is None
    assert Watch.told == []


def test_a_changed_reward_is_named_at_its_stage(run: Path) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        first, second = (next(r for r in rows if r["value"] == value) for value in (1.0, 0.0))
        first["value"], second["value"] = 0.0, 1.0  # the step's mean does not change

    change_rows(run, 3, change)
    found = repeated(run, step=3, rescore=True)
    assert results(found)["rewards"] == "differs"
    assert found.first_difference is not None
    assert found.first_difference.name == "rescore"
    assert found.first_difference.detail.startswith("2 of 8 rewards; rollout ")
    assert "ok 0.0 recorded, ok 1.0 now" in found.first_difference.detail
    without = repeated(run, step=3)
    assert without.first_difference is not None
    assert without.first_difference.name == "rewards"


def test_changed_tokens_are_named_at_their_stage(run: Path) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        row = next(r for r in rows if r["triplets"])
        spans = json.loads(row["spans"])
        call = next(s for s in spans if s["attributes"].get("response_token_ids"))
        call["attributes"]["response_token_ids"][0] += 1
        row["spans"] = json.dumps(spans)

    change_rows(run, 3, change)
    found = repeated(run, step=3)
    assert found.first_difference is not None
    assert found.first_difference.name == "triplets"
    assert results(found)["rewards"] == "ok"


def test_a_lost_call_is_named_with_its_rollout(run: Path) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        row = next(r for r in rows if r["triplets"])
        row["spans"] = json.dumps([s for s in json.loads(row["spans"]) if "response_token_ids" not in s["attributes"]])

    change_rows(run, 3, change)
    assert "1 triplets recorded, 0 now" in detail(repeated(run, step=3), "triplets")


def test_a_different_figure_is_named_with_both_values(run: Path) -> None:
    found = repeated(run, "algorithm.change=2.0", step=3)
    assert found.first_difference is not None
    assert found.first_difference.name == "figures"
    assert "weight_change 1.0 recorded, 2.0 now" in found.first_difference.detail
    assert "algorithm.change is 2.0; the run's manifest says 1.0" in found.notes


def test_other_tasks_are_named(run: Path) -> None:
    def rename(rows: list[dict[str, Any]]) -> None:
        rows[0]["task_id"] = rows[1]["task_id"] = "train-7777"

    change_rows(run, 3, rename)
    found = repeated(run, step=3, rescore=True)
    assert results(found)["tasks"] == "differs"
    assert "2 of 12 rollouts are of other tasks" in detail(found, "tasks")
    assert "train-7777" in detail(found, "tasks")
    with pytest.raises(ConfigError, match="asks for 5 tasks with 2 rollouts each, and the run has recorded 12"):
        repeated(run, "algorithm.tasks=5", step=3)


def test_only_rescoring_finds_a_changed_reward(run: Path) -> None:
    assert repeated(run, "reward.right=0.5", step=3).first_difference is None
    found = repeated(run, "reward.right=0.5", step=3, rescore=True)
    assert found.first_difference is not None
    assert found.first_difference.name == "rescore"
    assert "ok 1.0 recorded, ok 0.5 now" in found.first_difference.detail


def test_an_adapter_that_now_keeps_nothing_is_a_difference(run: Path) -> None:
    found = repeated(run, "adapter.match=nowhere", step=3)
    assert found.first_difference is not None
    assert found.first_difference.name == "triplets"
    assert "1 triplets recorded, 0 now" in found.first_difference.detail
    assert "the step stops the run" in detail(found, "update")


def test_a_run_without_digests_is_compared_as_far_as_possible(run: Path) -> None:
    change_lines(run, lambda line: line.pop("digests"))
    found = repeated(run, step=3)
    assert found.first_difference is None
    assert detail(found, "triplets").endswith("(no digest was recorded)")
    assert found.inexact
    assert "has not recorded its threads" in found.inexact[0]
    for name in ("start", "advantages", "samples", "batches", "weights"):
        assert results(found)[name] == "not compared", name
    change_lines(run, lambda line: line.update(reward=0.123))
    assert results(repeated(run, step=3))["rewards"] == "differs"


@pytest.mark.parametrize(
    ("remove", "step", "error", "words"),
    [
        (
            "",
            7,
            ConfigError,
            "has no line of step 7; it has steps 1 to 3. Steps of this run that can be replayed: 1, 3",
        ),
        ("", 2, ConfigError, "checkpoint of step 1, which does not exist; steps with a checkpoint: 2, 3"),
        ("rollouts/train-00003.parquet", 3, ConfigError, "the file with the rollouts of step 3, is missing"),
        ("checkpoints/step-00002/number.json", 3, CheckpointDamaged, "number.json is missing"),
        ("config.toml", 3, ConfigError, "is not a run directory"),
        ("metrics.jsonl", 3, ConfigError, "has no line of step 3; it has no steps"),
    ],
)
def test_what_is_missing_is_named(run: Path, remove: str, step: int, error: type[Exception], words: str) -> None:
    if remove:
        (run / remove).unlink()
    with pytest.raises(error, match=words):
        repeated(run, step=step)


def test_damaged_rollouts_are_named(run: Path) -> None:
    file = run / "rollouts" / "train-00003.parquet"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RunFileError, match=r"train-00003\.parquet"):
        repeated(run, step=3)
    file.write_bytes(whole)
    change_rows(run, 3, lambda rows: rows[0].update(spans='"a text"'))
    with pytest.raises(RunFileError, match="spans could not be written as JSON"):
        repeated(run, step=3)


def test_an_algorithm_that_runs_the_agent_itself_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = recorded_plan(run)
    number = type(plan.build("algorithm"))
    monkeypatch.setattr(number, "run", lambda self, session: session.foreign())
    with pytest.raises(AgentrigError, match="runs the agent itself"):
        replay(plan, run, 3)


def test_the_command_prints_a_table_and_ends_with_its_status(run: Path) -> None:
    def call(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(main, ["replay", str(run), *words])
        return done.exit_code, done.output

    status, text = call("--step", "3")
    assert status == 0
    assert "every stage that was compared is the same; not compared: start, advantages" in text
    status, text = call("--step", "3", "algorithm.change=2.0")
    assert status == 1
    assert "first difference: figures" in text
    status, text = call("--step", "9")
    assert status == 2
    assert "has no line of step 9" in text
    status, text = call("--step", "3", "--json")
    found = json.loads(text)
    assert (status, found["same"], found["first_difference"]) == (0, True, None)
    assert [stage["name"] for stage in found["stages"]][:2] == ["tasks", "start"]
