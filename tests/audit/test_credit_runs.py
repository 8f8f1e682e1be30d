"""Runs whose credit samples again (`dapo`) or has a teacher (`opd`): the auditor looks at every link, and all hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import audited_runs
import pyarrow.parquet as pq
import pytest
import torch
from audited_runs import PLUGIN, tiny_model, trained, verdicts
from embedded_servers import embedded

from agentrig import teacher as module
from agentrig.errors import ConfigError, RunStopped
from agentrig.run.drawing import Drawing
from agentrig.run.resume import resume_plan
from agentrig.run.training import train

DAPO = ("credit.use=dapo", "credit.overlong_buffer_len=3", "credit.max_num_gen_batches=3", "algorithm.group_size=2")
VALUE = 'value = sum("a" <= c <= "m" for c in text) / max(len(text), 1)'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def rewarded(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """Let the reward of the runs of this test be another one."""
    assert VALUE in PLUGIN
    monkeypatch.setattr(audited_runs, "PLUGIN", PLUGIN.replace(VALUE, f"value = {value}"))


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reward is 0 or 1, so that some groups of two are equal."""
    rewarded(monkeypatch, "float(len(text) % 2)")


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def table(run: Path, name: str, step: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(run / name / f"train-{step:05d}.parquet").to_pylist()
    return found


@pytest.mark.slow
def test_groups_that_are_equal_are_sampled_again_up_to_a_limit(odd: None, model: Path, tmp_path: Path) -> None:
    run = trained(tmp_path, model, *DAPO, "algorithm.save_every=1")
    train(resume_plan(run, overrides=["algorithm.steps=3"]), resume=run)
    found, lines = verdicts(run), lines_of(run)
    for step in (1, 2, 3):
        seen = {link: found[step][link]["result"] for link in ("tasks", "advantages", "gradient", "weights")}
        assert set(seen.values()) == {"ok"}, found[step]
        groups: dict[str, list[dict[str, Any]]] = {}
        for row in table(run, "rollouts", step):
            groups.setdefault(row["group"], []).append(row)
        equal = {name for name, rows in groups.items() if len({row["value"] for row in rows}) == 1}
        figures = lines[step - 1]["algorithm"]
        assert figures["groups_not_admitted"] == len(equal)
        assert (figures["num_gen_batches"] == 1) == (len(groups) == 3)
        assert len(groups) == 3 + len(equal) or figures["num_gen_batches"] == 3
        rows = [row for rows in groups.values() for row in rows]
        dropped = {row["rollout"] for row in table(run, "calls", step) if row["reason"] == "not-admitted"}
        assert dropped == {row["id"] for row in rows if row["group"] in equal}
    assert max(line["algorithm"]["num_gen_batches"] for line in lines) > 1


@pytest.mark.slow
def test_a_batch_of_other_tasks_is_named(
    odd: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first(self: Drawing, step: int, batch: int, n: int, *, taken: object) -> Any:
        return [self.tasks[0]] * n

    monkeypatch.setattr(Drawing, "again", first)
    with pytest.raises(RunStopped, match=r"  tasks: batch 2 of step \d has train-0.* instead of train-"):
        trained(tmp_path, model, *DAPO, "algorithm.steps=4")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tiny_model(tmp_path_factory.mktemp("teacher"), seed=5)
    with embedded(folder, name="wise", slots=8) as running:
        yield running


def opd(teacher: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("TEACHER_KEY", teacher.api_key)
    key = 'credit.api_key={env = "TEACHER_KEY"}'
    return ["credit.use=opd", f"credit.base_url={teacher.base_url}", "credit.model=wise", key]


@pytest.mark.slow
def test_a_teacher_is_asked_about_each_token_and_rewards_do_not_count(
    model: Path, teacher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewarded(monkeypatch, "0.0")
    run = trained(tmp_path, model, *opd(teacher, monkeypatch))
    found = verdicts(run)
    for step in (1, 2):
        assert {link: v["detail"] for link, v in found[step].items() if v["result"] != "ok"} == {}
        rows = table(run, "calls", step)
        assert {row["place"] for row in rows} == {"trained"}
        for row in rows:
            worths, said = json.loads(row["token_advantages"]), json.loads(row["teacher_logprobs"])
            assert len(worths) == len(said) == row["tokens"]
            assert row["advantage"] == pytest.approx(sum(worths) / len(worths))
            assert max(said) <= 0


@pytest.mark.slow
def test_what_the_teacher_did_not_say_is_named(
    model: Path, teacher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module.opd

    def other(groups: Any, heard: Any) -> Any:
        return real(groups, {call: [value - 0.1 for value in said] for call, said in heard.items()})

    monkeypatch.setattr(module, "opd", other)
    with pytest.raises(RunStopped, match=r"  advantages: 24 of 24 calls have another advantage"):
        trained(tmp_path, model, *opd(teacher, monkeypatch))


def test_a_teacher_that_is_down_is_refused_before_the_first_rollout(model: Path, tmp_path: Path) -> None:
    own = ["credit.use=opd", "credit.base_url=http://127.0.0.1:9/v1", "credit.model=wise"]
    with pytest.raises(ConfigError, match=r"teacher wise at http://127.0.0.1:9/v1 can't be used: .* does not answer"):
        trained(tmp_path, model, *own)
    assert not list(tmp_path.glob("run/rollouts/*"))
