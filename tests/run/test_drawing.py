"""Which tasks a step draws under each rule, and that a resumed run draws what it would have drawn without its end."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from agentrig_grpo.config import GrpoConfig
from rollouts import rollout

from agentrig import Score, Task
from agentrig.errors import RunFileError
from agentrig.rollouts import Rollout
from agentrig.run.directory import RunDirectory
from agentrig.run.drawing import RULES, Drawing, Group, groups_of
from agentrig.settings import structure

TASKS = [Task(id=f"t{i}", input={"n": i}) for i in range(12)]
SOLVED = {"t0", "t1", "t2", "t3", "t4", "t5", "t6"}


def drawing(rule: str, *, n: int = 4, tasks: Sequence[Task] = TASKS, seed: int = 3, **settings: Any) -> Drawing:
    given = {"task_sampling": rule, "tasks_per_step": n, **settings}
    return RULES[rule](tasks, structure(GrpoConfig, given, owner="grpo", section="algorithm"), seed)


def group(task: str, *values: float, solved: bool = False) -> Group:
    return Group(task=task, values=values, solved=solved)


def steps(draws: Drawing, count: int, answer: Callable[[str], Group]) -> list[list[str]]:
    """Draw the tasks of some steps, each of which gives these groups."""
    found = []
    for step in range(1, count + 1):
        found.append([task.id for task in draws.draw(step)])
        draws.see(map(answer, found[-1]))
    return found


# --- by difficulty ---


def test_tasks_whose_groups_differed_are_drawn_more_often_and_every_task_stays_possible() -> None:
    """Weights approach 1 and 0.1: with 4 of 12 tasks that differ, a step of one task draws one of them in 4 of 4.8."""
    hard = {"t0", "t3", "t6", "t9"}
    draws = drawing("by-difficulty", n=1)
    drawn = steps(draws, 3000, lambda task: group(task, 0.0, 1.0 if task in hard else 0.0))
    times = Counter(task for step in drawn[300:] for task in step)
    assert sum(times[task] for task in hard) / sum(times.values()) == pytest.approx(4 / 4.8, abs=0.03)
    assert len(times) == len(TASKS)
    figures = draws.figures(3000)
    assert figures["tasks_differing"] == pytest.approx(float(drawn[-1][0] in hard), abs=0.1)
    assert figures["tasks_differing_all"] == pytest.approx(4 / 12, abs=0.05)


# --- without solved tasks ---


def test_tasks_whose_last_group_was_all_correct_are_left_out_and_checked_again() -> None:
    draws = drawing("skip-solved", recheck_every=3)
    drawn = steps(draws, 9, lambda task: group(task, 1.0, solved=task in SOLVED))
    assert drawn[:3] == steps(drawing("uniform"), 3, group), "nothing is known of what was never drawn"
    times = Counter(task for step in drawn for task in step)
    later = Counter(task for step in drawn[3:] for task in step)
    assert {times[task] for task in SOLVED} == {2}, "once, and again the third time"
    assert all(later[task] >= 3 for task in {t.id for t in TASKS} - SOLVED)
    figures = draws.figures(4)
    assert figures["tasks_skipped"] > 0
    assert figures["tasks_solved"] == len(SOLVED)


def test_no_tasks_at_all() -> None:
    for rule in RULES:
        with pytest.raises(ValueError, match="no training tasks"):
            drawing(rule, tasks=()).draw(1)


# --- a resumed run ---


def played(task: str, step: int, place: int) -> list[Rollout]:
    """Return a group as a run makes it; what it is depends on the step, so that history counts."""
    rng, found = random.Random(f"{task} {step}"), []
    easy = task in SOLVED and rng.random() < 0.8
    for i in range(3):
        value = rng.choice([None, 0.0, 1.0])
        score = Score.ok(1.0, correct=True) if easy else Score.invalid("x") if value is None else Score.ok(value)
        made = rollout(score=score, group=f"train-{step}-{place}")
        found.append(attrs.evolve(made, id=f"r{step}-{place}-{i}", task=Task(id=task, input={}), step=step))
    return found


@pytest.mark.parametrize("rule", RULES)
def test_a_resumed_run_draws_the_same_tasks_from_what_it_has_recorded(rule: str, tmp_path: Path) -> None:
    run, whole, drawn = RunDirectory(tmp_path), drawing(rule, recheck_every=2), []
    for step in range(1, 15):
        drawn.append(whole.draw(step))
        rollouts = [r for place, task in enumerate(drawn[-1]) for r in played(task.id, step, place)]
        run.write_rollouts(rollouts, mode="train", step=step)
        whole.see(groups_of(rollouts))
    for first in (1, 2, 9, 14):
        resumed = drawing(rule, recheck_every=2)
        resumed.resume(tmp_path, first)
        assert resumed.draw(first) == drawn[first - 1]
        assert resumed.figures(first) == whole.figures(first)
    other = drawing(rule, recheck_every=2, seed=4)
    other.resume(tmp_path, 9)
    assert other.draw(9) != drawn[8], "it depends on the run's seed"


@pytest.mark.parametrize("rule", RULES)
def test_a_lost_file_of_rollouts_is_named_where_it_counts(rule: str, tmp_path: Path) -> None:
    run, draws = RunDirectory(tmp_path), drawing(rule)
    rollouts = [r for place, task in enumerate(draws.draw(1)) for r in played(task.id, 1, place)]
    run.write_rollouts(rollouts, mode="train", step=1)
    if rule == "uniform":
        draws.resume(tmp_path, 5)
        return
    with pytest.raises(RunFileError, match=r"train-00002.parquet is gone. .*algorithm.task_sampling=uniform"):
        drawing(rule).resume(tmp_path, 3)
    (tmp_path / "rollouts" / "train-00001.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(RunFileError, match=rf"train-00001.parquet is damaged: .*{rule} draws tasks by what it holds"):
        drawing(rule).resume(tmp_path, 2)
