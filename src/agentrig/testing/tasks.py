"""The checks of a task set."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import combinations
from typing import Any

import attrs

from agentrig.run.splits import ROLES, check_set, read_split
from agentrig.tasks import Task, Tasks, fingerprint, overlap
from agentrig.testing.checks import CheckFailed, Report
from agentrig.testing.elsewhere import elsewhere
from agentrig.testing.samples import difference, texts_of
from agentrig.testing.subject import Subject
from agentrig.testing.table import Bench, Table

LONG = 20
"""From this many characters on, a gold answer inside a longer text of the input counts as given away."""

GIVEN_AWAY = 0.9
"""Share of the tasks whose gold answer may not be in their input."""

ELSEWHERE_S = 120.0
"""Seconds for loading in another process."""


@attrs.define(kw_only=True, eq=False, slots=False)
class TasksBench(Bench):
    """What the checks of a task set share.

    Attributes:
        splits: The splits to load; None for those that have a role.
        shared: Keys of `private` whose values the agent may know too.
    """

    splits: Sequence[str] | None = None
    shared: Sequence[str] = ()

    @property
    def who(self) -> str:
        """How messages call it."""
        return f"task set {self.subject}"

    @cached_property
    def names(self) -> list[str]:
        """The splits to load, those with a role first."""
        made: Tasks = self.made
        return list(self.splits if self.splits is not None else dict.fromkeys(made.roles.values()))

    @cached_property
    def rows(self) -> dict[str, Sequence[Task]]:
        """The tasks of each split."""
        return self.load(self.made, self.names)

    @cached_property
    def there(self) -> Mapping[str, Any]:
        """The contents of each split in another process."""
        return elsewhere(_loaded_there, self.subject.sendable(), self.names, deadline_s=ELSEWHERE_S)

    @cached_property
    def again(self) -> dict[str, dict[str, Sequence[Task]]]:
        """The tasks of each split, loaded twice more; by how."""
        return {
            "loaded twice": self.load(self.made, self.names),
            "built again, its splits loaded in the other order": self.load(self.subject.build(), self.names[::-1]),
        }

    def load(self, made: Tasks, names: Sequence[str]) -> dict[str, Sequence[Task]]:
        """Load splits and check their rows, as a run does."""
        return {name: read_split(made, name, who=self.who) for name in names}

    def part(self, role: str) -> tuple[str, Sequence[Task]]:
        """Return a role's split and tasks; an empty name if it has none."""
        name = self.made.roles.get(role, "")
        return name, self.rows.get(name, ())


TABLE = Table("tasks", TasksBench)
check = TABLE.check


@check(
    "splits",
    why="A run does not find its training, validation or test tasks.",
    cure='Write `splits = ("train", "test")` and `roles = {"train": "train", "report": "test"}`.',
)
def splits(bench: TasksBench) -> None:
    """`splits` names the splits, `roles` says which role each has."""
    check_set(bench.made, bench.who)


@check(
    "rows",
    why="A run does not start with such rows, or mixes up two tasks with one id.",
    cure="Give each task an id of its own, and only JSON values (text, numbers, lists, dicts) as input and private.",
    needs=["splits"],
)
def rows(bench: TasksBench) -> None:
    """Every split loads, and every row is a valid `Task` with an id of its own."""
    _ = bench.there  # first where it can end nothing else
    _ = bench.rows


@check(
    "roles",
    why="Without training tasks nothing is learned; without held-out tasks nobody can say what was learned.",
    cure="Give each role a split of its own with tasks: hold some tasks out for validation and for the report.",
    needs=["rows"],
)
def roles(bench: TasksBench) -> None:
    """Training, validation and report have a split each, with tasks."""
    optional = getattr(bench.made, "optional", ())
    named: dict[str, str] = {}
    for role in ROLES:
        name, tasks = bench.part(role)
        if bench.splits is not None and name not in bench.splits:
            continue
        if not tasks and role not in optional:
            raise CheckFailed(f'the split "{name}" of {role} has no tasks' if name else f"no split serves {role}")
        if name and name in named:
            raise CheckFailed(f'the split "{name}" serves {named[name]} and {role}')
        named[name] = role


@check(
    "same-twice",
    why="A resumed run would go on with other tasks, and an audit finds others.",
    cure="Seed a random generator of your own: `random.Random(0)`; keep the order of files and rows.",
    needs=["rows"],
)
def same_twice(bench: TasksBench) -> None:
    """Loading again, and building again, gives the same tasks in the same order."""
    for how, found in bench.again.items():
        _compare(bench, how, {name: _contents(tasks) for name, tasks in found.items()})


@check(
    "stable-ids",
    why="Rollouts, resumed runs and comparisons of runs find a task by its id.",
    cure="Make ids from the data, for example the row's number in its file; use no counter, no `hash()`, no `uuid4()`.",
    needs=["rows"],
)
def stable_ids(bench: TasksBench) -> None:
    """Ids are the same when a split is loaded again, alone, and after other splits."""
    known = {name: [task.id for task in tasks] for name, tasks in bench.rows.items()}
    for how, found in bench.again.items():
        for name, ids in known.items():
            different = difference(ids, [task.id for task in found[name]])
            if different:
                raise CheckFailed(f"split {name}, {how}: the ids differ: {different}")


@check(
    "other-process",
    why="Another machine, or the same command tomorrow, would train and measure on other tasks.",
    cure="Sort sets and listings of folders; use no `hash()` of a text.",
    needs=["same-twice"],
)
def other_process(bench: TasksBench) -> None:
    """A process with another hash seed loads the same tasks."""
    _compare(bench, "here and in another process", bench.there)


@check(
    "disjoint",
    why="Accuracy on tasks that were trained on says nothing about new ones.",
    cure="Split by what makes two tasks the same (the question, the document, the database), then remove repetitions.",
    needs=["rows"],
)
def disjoint(bench: TasksBench) -> None:
    """No task of one role is in another role's split."""
    parts = {role: bench.part(role) for role in ROLES}
    for one, other in combinations(ROLES, 2):
        (first, mine), (second, theirs) = parts[one], parts[other]
        shared = overlap(mine, theirs) if first != second else []
        if shared:
            task = shared[0][1]
            raise CheckFailed(
                f'{len(shared)} of {len(theirs)} tasks of {other} ("{second}") are in {one} ("{first}") too; '
                f"the first: {task.place or task.id}"
            )


@check(
    "picklable",
    why="A task's input is sent to the processes that run the agent.",
    cure="Use plain dicts and lists: no `MappingProxyType`, no objects of your own, no open files.",
    needs=["rows"],
)
def picklable(bench: TasksBench) -> None:
    """Each task survives the way to another process unchanged."""
    for name, tasks in bench.rows.items():
        for task in tasks:
            try:
                found = pickle.loads(pickle.dumps(task))
            except Exception as error:
                raise CheckFailed(f"split {name}, task {task.id}: {type(error).__name__}: {error}") from error
            different = difference(_contents([task]), _contents([found]))
            if different:
                raise CheckFailed(f"split {name}, task {task.id}: it arrives changed: {different}")


@check(
    "gold-apart",
    why="The agent reads the answer instead of working it out, and accuracy is worthless.",
    cure="Put what only the reward may know into `private` alone; if the agent may know a key, say shared=[KEY].",
    needs=["rows"],
)
def gold_apart(bench: TasksBench) -> None:
    """What is in `private` is not in `input` too."""
    for name, tasks in bench.rows.items():
        keys = {key for task in tasks for key in task.private if key not in bench.shared}
        for key in sorted(keys):
            golds = [(task, text) for task in tasks for text in texts_of(task.private.get(key))[:1] if text]
            found = [task for task, text in golds if _given_away(text, texts_of(dict(task.input)))]
            if len({text for _, text in golds}) > 1 and len(found) >= GIVEN_AWAY * len(golds):
                raise CheckFailed(
                    f'split {name}: private["{key}"] is in the input of {len(found)} of {len(golds)} tasks; the first: '
                    f"{found[0].id}"
                )


def _given_away(text: str, given: Sequence[str]) -> bool:
    return any(text == part or (len(text) >= LONG and text in part) for part in given)


def _contents(tasks: Sequence[Task]) -> list[Any]:
    return [[dict(task.input), dict(task.private), task.row] for task in tasks]


def _marks(tasks: Sequence[Any]) -> list[str]:
    """Return a digest of each task's contents, without its id and without folders."""
    return [fingerprint([Task(id="", input=given, private=private)]) for given, private, _ in tasks]


def _loaded_there(subject: Subject, names: Sequence[str]) -> Mapping[str, Any]:
    """Load in the other process."""
    bench = TasksBench(subject=subject, splits=names)
    return {name: _contents(tasks) for name, tasks in bench.rows.items()}


def _compare(bench: TasksBench, how: str, found: Mapping[str, Any]) -> None:
    """Fail if the contents of splits differ from those of the first load."""
    for name, tasks in bench.rows.items():
        known = _contents(tasks)
        if len(known) != len(found[name]):
            raise CheckFailed(f"split {name}, {how}: {len(known)} tasks and {len(found[name])}")
        for task, one, other, mark, second in zip(
            tasks, known, found[name], _marks(known), _marks(found[name]), strict=True
        ):
            if mark != second:
                raise CheckFailed(f"split {name}, task {task.id}, {how}: {difference(one, other)}")


def check_tasks(
    subject: Any, *, settings: Any = None, only: Sequence[str] | None = None, raise_failed: bool = True, **options: Any
) -> Report:
    """Run the checks of a task set; see `agentrig.testing.check`, and `TasksBench` for the options.

    Example:
        ```python
        check_tasks("my_tasks.py:mine", settings={"size": 40})
        ```
    """
    return TABLE.check_all(subject, settings, only, raise_failed, options)
