"""Which tasks a step draws: `algorithm.task_sampling`. A rule looks at the groups of the steps before, and no others.

What it has seen is in the run's files of rollouts, so a resumed run draws what it would have drawn without the end.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from agentrig.errors import RunFileError
from agentrig.run.damage import reading
from agentrig.run.directory import table_name
from agentrig.tasks import Task, order_of_epoch, tasks_of_step

if TYPE_CHECKING:
    from agentrig.learners import LoopSettings
    from agentrig.rollouts import Rollout

LEAST = 0.1
"""The least weight of a task in `by-difficulty`; the largest is 1."""


@attrs.frozen(kw_only=True)
class Group:
    """What a rule looks at in the rollouts of a task.

    Attributes:
        values: The rewards of the rollouts that were scored.
        solved: Whether every rollout, failures included, is correct.
    """

    task: str
    values: Sequence[float]
    solved: bool


class Drawing:
    """Draws the tasks of a run's steps, from the first on: `uniform`, and what the other rules build on.

    Each epoch shuffles all tasks, and steps take consecutive slices.
    """

    sees = False
    """Whether it looks at groups."""

    def __init__(self, tasks: Sequence[Task], settings: LoopSettings, seed: int) -> None:
        self.tasks, self.settings, self.seed = tasks, settings, seed
        self._figures: dict[int, Mapping[str, float]] = {}

    def draw(self, step: int) -> Sequence[Task]:
        """Return the tasks of a step; call it once for each step, after `see` has got all groups before."""
        n = self.settings.tasks_per_step
        if not self.sees or not self.tasks:  # without any task it raises
            return tasks_of_step(self.tasks, n=n, step=step, seed=self.seed)
        places, self._figures[step] = self._chosen(n, step)
        return [self.tasks[place] for place in places]

    def again(self, step: int, batch: int, n: int, *, taken: Collection[str]) -> Sequence[Task]:
        """Return the tasks of a later batch of a step, whatever the rule is.

        All tasks are shuffled with `random.Random(f"tasks {seed} {step} {batch}")`. Those that the step has not sampled
        yet come first; where there are too few, the others follow in that order, then all from the beginning.

        Args:
            batch: Which one, from 2 on.
        """
        order = list(self.tasks)
        random.Random(f"tasks {self.seed} {step} {batch}").shuffle(order)
        order.sort(key=lambda task: task.id in taken)
        return [order[i % len(order)] for i in range(n)]

    def figures(self, step: int) -> Mapping[str, float]:
        """Return what `metrics.jsonl` says of the drawing of a step; once."""
        return self._figures.pop(step, {})

    def see(self, groups: Iterable[Group]) -> None:
        """Take in the groups of the latest step."""
        for group in groups:
            self._seen(group)

    def resume(self, run: Path, first_step: int) -> None:
        """Take in the groups that a run has recorded before a step."""
        for step in range(1, first_step if self.sees else 1):
            self.draw(step)
            self.figures(step)
            self.see(recorded(run, step, self.settings.task_sampling))

    def _chosen(self, n: int, step: int) -> tuple[Sequence[int], Mapping[str, float]]:
        """Return the places of a step's tasks, and its figures."""
        raise NotImplementedError

    def _seen(self, group: Group) -> None:
        """Take in one group."""


class ByDifficulty(Drawing):
    """Draws tasks more often whose groups differed lately: from rewards that are all equal nothing is learned.

        u_t = 1 before the first group of task t; after each, u_t = (u_t + d) / 2, where d is 1 if it has two different
              rewards, else 0. A group with fewer than two scored rollouts changes nothing.
        w_t = 0.1 + 0.9 u_t

    A step draws different tasks one after the other, each with the probability w_t / sum of w over the tasks that are
    left, so every task stays possible. It takes the tasks with the largest ln(r_t) / w_t (Efraimidis and Spirakis,
    2006): r_t is 1 minus the next number of `random.Random(f"tasks {seed} {step}")`, in the order of the tasks. Once
    all tasks are drawn, it goes on with new numbers.

    `tasks_differing` is the mean u of the drawn tasks, `tasks_differing_all` that of all tasks.
    """

    sees = True

    def __init__(self, tasks: Sequence[Task], settings: LoopSettings, seed: int) -> None:
        super().__init__(tasks, settings, seed)
        self._differing = {task.id: 1.0 for task in tasks}

    def _chosen(self, n: int, step: int) -> tuple[Sequence[int], Mapping[str, float]]:
        random_number, chosen = random.Random(f"tasks {self.seed} {step}").random, list[int]()
        differing = [self._differing[task.id] for task in self.tasks]
        while len(chosen) < n:
            keys = [math.log(1 - random_number()) / (LEAST + (1 - LEAST) * u) for u in differing]
            chosen += heapq.nlargest(n - len(chosen), range(len(keys)), key=keys.__getitem__)
        drawn = math.fsum(differing[place] for place in chosen) / n
        return chosen, {"tasks_differing": drawn, "tasks_differing_all": math.fsum(differing) / len(differing)}

    def _seen(self, group: Group) -> None:
        if len(group.values) > 1 and group.task in self._differing:
            self._differing[group.task] = (self._differing[group.task] + (len(set(group.values)) > 1)) / 2


class SkipSolved(Drawing):
    """Goes through the tasks in the order of `uniform`, and leaves out those whose last group was all correct.

    A solved task is passed over `recheck_every - 1` times, and drawn when it comes up next. A step that has looked at
    max(n, number of tasks) places of the order and has fewer than n tasks adds those that it passed over, in the order
    in which they came. The next step begins behind the last place.

    `tasks_skipped` is how many were passed over and not added, `tasks_solved` how many count as solved.
    """

    sees = True

    def __init__(self, tasks: Sequence[Task], settings: LoopSettings, seed: int) -> None:
        super().__init__(tasks, settings, seed)
        self._order = self._places()
        self._solved, self._passed = set[str](), Counter[int]()

    def _places(self) -> Iterator[int]:
        for epoch in count():
            yield from order_of_epoch(len(self.tasks), epoch=epoch, seed=self.seed)

    def _chosen(self, n: int, step: int) -> tuple[Sequence[int], Mapping[str, float]]:
        chosen, passed = list[int](), list[int]()
        while len(chosen) < n and len(chosen) + len(passed) < max(n, len(self.tasks)):
            place = next(self._order)
            if self.tasks[place].id in self._solved and self._passed[place] < self.settings.recheck_every - 1:
                self._passed[place] += 1
                passed.append(place)
            else:
                chosen.append(place)
        added = passed[: n - len(chosen)]
        chosen += added
        for place in chosen:
            self._passed[place] = 0
        return chosen, {"tasks_skipped": len(passed) - len(added), "tasks_solved": len(self._solved)}

    def _seen(self, group: Group) -> None:
        (self._solved.add if group.solved else self._solved.discard)(group.task)


RULES: Mapping[str, type[Drawing]] = {"uniform": Drawing, "by-difficulty": ByDifficulty, "skip-solved": SkipSolved}
"""By the value of `task_sampling`."""


def groups_of(rollouts: Iterable[Rollout]) -> list[Group]:
    """Return the groups of a step, in their order."""
    return _groups((r.group, r.task.id, r.value, r.correct) for r in rollouts)


def recorded(run: Path, step: int, rule: str) -> list[Group]:
    """Return the groups of a step that a run has recorded, in their order."""
    import pyarrow.parquet as pq

    file = run / table_name("train", step)
    cure = f"{rule} draws tasks by what it holds: restore it from a copy, or go on with algorithm.task_sampling=uniform"
    try:
        with reading(file, cure):
            table = pq.read_table(file, columns=["group", "task_id", "value", "correct"])
            return _groups(zip(*(column.to_pylist() for column in table.columns), strict=True))
    except FileNotFoundError:
        raise RunFileError(f"{file} is gone. {cure[0].upper()}{cure[1:]}") from None


def _groups(rows: Iterable[tuple[str, str, Any, Any]]) -> list[Group]:
    found: dict[str, tuple[str, list[Any], list[Any]]] = {}
    for name, task, value, correct in rows:
        _, values, verdicts = found.setdefault(name, (task, [], []))
        values.append(value)
        verdicts.append(correct)
    return [
        Group(task=task, values=[v for v in values if v is not None], solved=all(verdicts))
        for task, values, verdicts in found.values()
    ]
