"""The auditor computes which tasks a step should have drawn, by code of its own, from what a run has recorded."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import attrs
import audited_runs
import pytest
import torch
from agentrig_grpo.config import GrpoConfig
from audited_runs import PLUGIN, tiny_model, trained, verdicts
from rollouts import rollout

from agentrig import Score, Task
from agentrig.audit.draws import drawn
from agentrig.audit.record import Record, Sources
from agentrig.audit.step import Step
from agentrig.audit.verdicts import CannotLook
from agentrig.credit import differ
from agentrig.errors import RunStopped
from agentrig.rollouts import Rollout
from agentrig.run.drawing import RULES, SkipSolved, groups_of
from agentrig.run.gate import Gate
from agentrig.run.resume import resume_plan
from agentrig.run.rows import row_of
from agentrig.run.training import train
from agentrig.settings import structure


def recorded(rule: str, seed: int, *, steps: int = 8, **settings: Any) -> tuple[Any, list[list[str]]]:
    """Return the last step as the auditor reads it, and the tasks of each step."""
    rng = random.Random(seed)
    tasks = [Task(id=f"t{i}", input={}) for i in range(rng.randint(1, 12))]
    sizes = {"tasks_per_step": rng.randint(1, 15), "recheck_every": rng.randint(2, 4)}
    given = {"task_sampling": rule, **sizes, **settings}
    draws = RULES[rule](tasks, structure(GrpoConfig, given, owner="grpo", section="algorithm"), seed)
    tables: dict[int, list[dict[str, Any]]] = {}
    taken = []
    for step in range(1, steps + 1):
        taken.append([task.id for task in draws.draw(step)])
        rollouts = [r for place, task in enumerate(taken[-1]) for r in group_of(task, f"train-{step}-{place}", rng)]
        tables[step] = [row_of(r) for r in rollouts]
        draws.see(groups_of(rollouts))
    return step_of(tables, tasks, seed, given, {"use": "dr-grpo"}), taken


def step_of(
    tables: dict[int, list[dict[str, Any]]], tasks: list[Task], seed: int, given: Any, credit: dict[str, Any]
) -> Any:
    """Return the last step of these rollouts as the auditor reads it."""
    record: Any = Record.__new__(Record)
    record.config = {"run": {"seed": seed}, "algorithm": {"use": "grpo"}, "credit": credit}
    record.settings, record.tables, record._groups = {"use": "grpo", **given}, tables, {}
    record.__dict__["_manifest"] = {}
    record.table = lambda folder, mode, step, *names: [{n: row[n] for n in names} for row in tables.get(step, ())]
    return Step(record=record, number=max(tables), sources=Sources(splits={"train": tasks}, score=None))


def named(step: Any) -> list[Any]:
    """Return the faults, with the step's file read anew."""
    step.record._groups.clear()
    return list(drawn(step))


def group_of(task: str, name: str, rng: random.Random) -> list[Rollout]:
    kind = rng.choice(["solved", "equal", "mixed", "failed"])
    found = []
    for _ in range(rng.randint(1, 3)):
        value = {"solved": 1.0, "equal": 0.5, "failed": None}.get(kind, rng.choice([0.0, 1.0, None]))
        made = rollout(score=Score.invalid("x") if value is None else Score.ok(value), group=name)
        found.append(attrs.evolve(made, task=Task(id=task, input={})))
    return found


@pytest.mark.parametrize("rule", RULES)
def test_what_a_rule_draws_is_confirmed_and_any_other_task_named(rule: str) -> None:
    found = 0
    for seed in range(30):
        step, taken = recorded(rule, seed)
        assert named(step) == []
        here, known = taken[-1], [task.id for task in step.sources.splits["train"]]
        others = [task for task in known if task not in here]
        if others:
            first = step.record.tables[8][0]["group"]
            for row in (row for row in step.record.tables[8] if row["group"] == first):
                row["task_id"] = others[0]
            (fault,) = named(step)
            assert fault.result == "fault"
            drew = f"step 8 trained on {others[0]}, which algorithm.task_sampling={rule}"
            assert fault.detail == f"{drew} does not draw then, instead of {here[0]}"
            found += 1
    assert found > 10


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("other", RULES)
def test_the_tasks_of_another_rule_are_named(rule: str, other: str) -> None:
    faults = 0
    for seed in range(20):
        step, _ = recorded(rule, seed, tasks_per_step=2)
        step.record.settings = {**step.settings, "task_sampling": other}
        faults += bool(named(step))
    assert faults == 0 if rule == other else faults > 5


def test_without_the_groups_before_it_cannot_look_and_a_run_from_before_draws_uniformly() -> None:
    step, _ = recorded("skip-solved", 1)
    del step.record.tables[3]
    with pytest.raises(CannotLook, match="the rollouts of step 3 are not there"):
        named(step)
    step, _ = recorded("uniform", 1)
    del step.record.settings["task_sampling"]
    assert named(step) == []


# --- groups that are sampled again ---


def gated(seed: int) -> Any:
    """Return a step of `dapo` as the auditor reads it, of at most three batches."""
    rng, tables = random.Random(seed), list[dict[str, Any]]()
    tasks = [Task(id=f"t{i}", input={}) for i in range(rng.randint(1, 9))]
    given = {"tasks_per_step": rng.randint(1, 6)}
    draws = RULES["uniform"](tasks, structure(GrpoConfig, given, owner="grpo", section="algorithm"), seed)

    def sample(chosen: Any) -> list[Rollout]:
        groups = [group_of(task.id, f"train-1-{len(tables)}-{place}", rng) for place, task in enumerate(chosen)]
        tables.extend(row_of(r) for group in groups for r in group)
        return [r for group in groups for r in group]

    Gate(differ, 3).sample(1, draws, sample)
    return step_of({1: tables}, tasks, seed, given, {"use": "dapo", "max_num_gen_batches": 3})


def test_the_batches_after_the_first_are_confirmed_and_faults_in_them_named() -> None:
    several = 0
    for seed in range(40):
        step = gated(seed)
        tables, n = step.record.tables[1], step.settings["tasks_per_step"]
        assert named(step) == []
        if len({row["group"] for row in tables}) == n:
            continue
        several += 1
        last = tables[-1]["group"]
        kept = list(tables)
        tables[:] = [row for row in kept if row["group"] != last]
        (fault,) = named(step)
        assert "groups that were not admitted" in fault.detail
        tables[:] = [*kept, {**kept[-1], "group": "more"}]
        (fault,) = named(step)
        assert "its gate asks for" in fault.detail or "not admitted" in fault.detail
        others = [task.id for task in step.sources.splits["train"] if task.id != kept[-1]["task_id"]]
        if others:
            tables[:] = [{**row, "task_id": others[0]} if row["group"] == last else row for row in kept]
            (fault,) = named(step)
            assert " instead of " in fault.detail
    assert several > 15


# --- in a run ---

SETTINGS = (
    "algorithm.task_sampling=skip-solved", "algorithm.tasks_per_step=4", "algorithm.group_size=2", "run.seed=1",
)  # fmt: skip
"""Step 1 draws tasks 4, 1, 5 and 2, step 2 then 0, 3, 5 and 1: the turn of 2 comes before that of 1."""
SOLVED = {"train-0", "train-2", "train-4"}


@pytest.fixture
def even_tasks_are_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    code = PLUGIN.replace("correct=len(text) % 2 == 0", 'correct=task.id[-1] in "024"')
    assert code != PLUGIN
    monkeypatch.setattr(audited_runs, "PLUGIN", code)


def drawn_in(run: Path) -> list[list[str]]:
    import pyarrow.parquet as pq

    tables = [pq.read_table(file).to_pylist() for file in sorted((run / "rollouts").glob("train-*.parquet"))]
    return [list({row["group"]: row["task_id"] for row in table}.values()) for table in tables]


@pytest.mark.slow
def test_a_resumed_run_skips_what_was_solved_and_the_auditor_confirms_it(
    even_tasks_are_solved: None, tmp_path: Path
) -> None:
    run = trained(tmp_path, tiny_model(tmp_path), *SETTINGS, "algorithm.steps=2", "algorithm.save_every=1")
    train(resume_plan(run, overrides=["algorithm.steps=4"]), resume=run)
    taken, found = drawn_in(run), verdicts(run)
    assert set(found) == {1, 2, 3, 4}
    assert {found[step]["tasks"]["result"] for step in found} == {"ok"}, found
    lines = [json.loads(line)["algorithm"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["tasks_solved"] == lines[0]["tasks_skipped"] == 0
    assert lines[3]["tasks_solved"] == 3
    assert sum(line["tasks_skipped"] for line in lines) > 0
    times = {task: sum(step.count(task) for step in taken) for task in {t for step in taken for t in step}}
    assert max(times[task] for task in SOLVED) < min(times[task] for task in times.keys() - SOLVED)


@pytest.mark.slow
def test_a_solved_task_that_is_drawn_all_the_same_is_named(
    even_tasks_are_solved: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SkipSolved, "_seen", lambda self, group: None)
    wrong = (
        "step 2 trained on train-2, which algorithm.task_sampling=skip-solved does not draw then, instead of train-1"
    )
    with pytest.raises(RunStopped, match=f"\n  tasks: {wrong}"):
        trained(tmp_path, tiny_model(tmp_path), *SETTINGS)
