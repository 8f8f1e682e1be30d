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
from agentrig.testing.elsewhere import elsewhere
from agentrig.testing.kit import CheckFailed, needs
from agentrig.testing.samples import difference, texts_of
from agentrig.testing.subject import Subject

LONG = 20
"""From this many characters on, a gold answer inside a longer text of the input counts as given away."""

GIVEN_AWAY = 0.9
"""Share of the tasks whose gold answer may not be in their input."""

ELSEWHERE_S = 120.0
"""Seconds for loading in another process."""


@attrs.define(kw_only=True, eq=False, slots=False)
class TasksSubject(Subject):
    """A task set.

    Attributes:
        splits: The splits to load; None for those that have a role.
        shared: Keys of `private` whose values the agent may know too.
    """

    splits: Sequence[str] | None = None
    shared: Sequence[str] = ()

    @property
    def who(self) -> str:
        """How messages call it."""
        return f"task set {self}"

    @cached_property
    def names(self) -> list[str]:
        """The splits to load, those with a role first."""
        made: Tasks = self.made
        return list(self.splits if self.splits is not None else dict.fromkeys(made.roles.values()))

    def load(self, names: Sequence[str], made: Tasks | None = None) -> dict[str, Sequence[Task]]:
        """Load splits and check their rows, as a run does."""
        tasks: Tasks = self.made if made is None else made
        return {name: read_split(tasks, name, who=self.who) for name in names}

    @cached_property
    def rows(self) -> dict[str, Sequence[Task]]:
        """The tasks of each split."""
        return self.load(self.names)

    @cached_property
    def there(self) -> Mapping[str, Any]:
        """The contents of each split in another process."""
        return elsewhere(_loaded_there, self.sendable(), self.names, deadline_s=ELSEWHERE_S)

    @cached_property
    def again(self) -> dict[str, dict[str, Sequence[Task]]]:
        """The tasks of each split, loaded twice more; by how."""
        return {
            "loaded twice": self.load(self.names),
            "built again, its splits loaded in the other order": self.load(self.names[::-1], self.build()),
        }

    def part(self, role: str) -> tuple[str, Sequence[Task]]:
        """Return a role's split and tasks; an empty name if it has none."""
        name = self.made.roles.get(role, "")
        return name, self.rows.get(name, ())


def check_splits(subject: TasksSubject) -> None:
    """`splits` names the splits, `roles` says which role each has.

    Why: A run does not find its training, validation or test tasks.
    Cure: Write `splits = ("train", "test")` and `roles = {"train": "train", "report": "test"}`.
    """
    check_set(subject.made, subject.who)


@needs(check_splits)
def check_rows(subject: TasksSubject) -> None:
    """Every split loads, and every row is a valid `Task` with an id of its own.

    Why: A run does not start with such rows, or mixes up two tasks with one id.
    Cure: Give each task an id of its own, and only JSON values (text, numbers, lists, dicts) as input and private.
    """
    _ = subject.there  # first where it can end nothing else
    _ = subject.rows


@needs(check_rows)
def check_roles(subject: TasksSubject) -> None:
    """Training, validation and report have a split each, with tasks.

    Why: Without training tasks nothing is learned; without held-out tasks nobody can say what was learned.
    Cure: Give each role a split of its own with tasks: hold some tasks out for validation and for the report.
    """
    optional = getattr(subject.made, "optional", ())
    named: dict[str, str] = {}
    for role in ROLES:
        name, tasks = subject.part(role)
        if subject.splits is not None and name not in subject.splits:
            continue
        if not tasks and role not in optional:
            raise CheckFailed(f'the split "{name}" of {role} has no tasks' if name else f"no split serves {role}")
        if name and name in named:
            raise CheckFailed(f'the split "{name}" serves {named[name]} and {role}')
        named[name] = role


@needs(check_rows)
def check_same_twice(subject: TasksSubject) -> None:
    """Loading again, and building again, gives the same tasks in the same order.

    Why: A resumed run would go on with other tasks, and an audit finds others.
    Cure: Seed a random generator of your own: `random.Random(0)`; keep the order of files and rows.
    """
    for how, found in subject.again.items():
        _compare(subject, how, {name: _contents(tasks) for name, tasks in found.items()})


@needs(check_rows)
def check_stable_ids(subject: TasksSubject) -> None:
    """Ids are the same when a split is loaded again, alone, and after other splits.

    Why: Rollouts, resumed runs and comparisons of runs find a task by its id.
    Cure: Make ids from the data, for example the row's number in its file; use no counter, no `hash()`, no `uuid4()`.
    """
    known = {name: [task.id for task in tasks] for name, tasks in subject.rows.items()}
    for how, found in subject.again.items():
        for name, ids in known.items():
            different = difference(ids, [task.id for task in found[name]])
            if different:
                raise CheckFailed(f"split {name}, {how}: the ids differ: {different}")


@needs(check_same_twice)
def check_other_process(subject: TasksSubject) -> None:
    """A process with another hash seed loads the same tasks.

    Why: Another machine, or the same command tomorrow, would train and measure on other tasks.
    Cure: Sort sets and listings of folders; use no `hash()` of a text.
    """
    _compare(subject, "here and in another process", subject.there)


@needs(check_rows)
def check_disjoint(subject: TasksSubject) -> None:
    """No task of one role is in another role's split.

    Why: Accuracy on tasks that were trained on says nothing about new ones.
    Cure: Split by what makes two tasks the same (the question, the document, the database), then remove repetitions.
    """
    parts = {role: subject.part(role) for role in ROLES}
    for one, other in combinations(ROLES, 2):
        (first, mine), (second, theirs) = parts[one], parts[other]
        shared = overlap(mine, theirs) if first != second else []
        if shared:
            task = shared[0][1]
            raise CheckFailed(
                f'{len(shared)} of {len(theirs)} tasks of {other} ("{second}") are in {one} ("{first}") too; '
                f"the first: {task.place or task.id}"
            )


@needs(check_rows)
def check_picklable(subject: TasksSubject) -> None:
    """Each task survives the way to another process unchanged.

    Why: A task's input is sent to the processes that run the agent.
    Cure: Use plain dicts and lists: no `MappingProxyType`, no objects of your own, no open files.
    """
    for name, tasks in subject.rows.items():
        for task in tasks:
            try:
                found = pickle.loads(pickle.dumps(task))
            except Exception as error:
                raise CheckFailed(f"split {name}, task {task.id}: {type(error).__name__}: {error}") from error
            different = difference(_contents([task]), _contents([found]))
            if different:
                raise CheckFailed(f"split {name}, task {task.id}: it arrives changed: {different}")


@needs(check_rows)
def check_gold_apart(subject: TasksSubject) -> None:
    """What is in `private` is not in `input` too.

    Why: The agent reads the answer instead of working it out, and accuracy is worthless.
    Cure: Put what only the reward may know into `private` alone; if the agent may know a key, say shared=[KEY].
    """
    for name, tasks in subject.rows.items():
        keys = {key for task in tasks for key in task.private if key not in subject.shared}
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


def _loaded_there(subject: TasksSubject, names: Sequence[str]) -> Mapping[str, Any]:
    """Load in the other process."""
    return {name: _contents(tasks) for name, tasks in subject.load(names).items()}


def _compare(subject: TasksSubject, how: str, found: Mapping[str, Any]) -> None:
    """Fail if the contents of splits differ from those of the first load."""
    for name, tasks in subject.rows.items():
        known = _contents(tasks)
        if len(known) != len(found[name]):
            raise CheckFailed(f"split {name}, {how}: {len(known)} tasks and {len(found[name])}")
        for task, one, other, mark, second in zip(
            tasks, known, found[name], _marks(known), _marks(found[name]), strict=True
        ):
            if mark != second:
                raise CheckFailed(f"split {name}, task {task.id}, {how}: {difference(one, other)}")
