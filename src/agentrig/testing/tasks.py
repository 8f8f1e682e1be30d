"""The checks of a task set."""

from __future__ import annotations

import pickle
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import combinations
from typing import Any

import attrs

from agentrig.run.splits import read_split, repeated_warnings, why_empty
from agentrig.tasks import ROLES, Task, Tasks, check_set, fingerprint, overlap
from agentrig.testing.elsewhere import elsewhere
from agentrig.testing.kit import basic
from agentrig.testing.subject import CheckFailed, Subject, difference, texts_of
from agentrig.text import cut

LONG = 20
"""From this many characters on, a gold answer inside a longer text of the input counts as given away."""


@attrs.define(kw_only=True, eq=False, slots=False)
class TasksSubject(Subject):
    """A task set.

    Attributes:
        splits: The splits to load; None for those that have a role.
        shared: Keys of `private` that the agent may know; `input.KEY`: what only tools read.
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
    def there(self) -> dict[str, Sequence[Task]]:
        """The tasks of each split in another process."""
        return elsewhere(TasksSubject.load, self.sendable(), self.names)

    def part(self, role: str) -> tuple[str, Sequence[Task]]:
        """Return a role's split and tasks; an empty name if it has none."""
        name = self.made.roles.get(role, "")
        return name, self.rows.get(name, ())


@basic
def check_splits(subject: TasksSubject) -> None:
    """`splits` names the splits, `roles` says which role each has.

    Why: A run does not find its training, validation or test tasks.
    Cure: Write `splits = ("train", "test")` and `roles = {"train": "train", "report": "test"}`.
    """
    check_set(subject.made, subject.who)


@basic
def check_rows(subject: TasksSubject) -> None:
    """Every split loads; every row is a valid `Task` with an id of its own, and reaches another process unchanged.

    Why: A run does not start with such rows, mixes up two tasks with one id, or cannot send them to its runners.
    Cure: Give each task an id of its own, and only JSON values as input and private: text, numbers, plain lists and
        dicts; no `MappingProxyType`, no objects of your own.
    """
    _ = subject.there  # first where it can end nothing else
    for name, tasks in subject.rows.items():
        for task in tasks:
            try:
                found = pickle.loads(pickle.dumps(task))
            except Exception as error:
                raise CheckFailed(f"split {name}, task {task.id}: {type(error).__name__}: {error}") from error
            if different := difference(_contents(task), _contents(found)):
                raise CheckFailed(f"split {name}, task {task.id}: it arrives changed: {different}")


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
            said = f'the split "{name}" of {role} has no tasks' if name else f"no split serves {role}"
            raise CheckFailed(said, cure=why_empty(subject.made, name))
        if name and name in named:
            raise CheckFailed(f'the split "{name}" serves {named[name]} and {role}')
        named[name] = role


def check_same_twice(subject: TasksSubject) -> None:
    """The same tasks with the same ids, in the same order: loaded again, built again, and in another process.

    Why: A resumed run would go on with other tasks; an audit, and a comparison of runs, finds a task by its id.
    Cure: Keep the order of files and rows, and make ids from the data. Use no counter, no `hash()` of a text, no order
        of a set, no `uuid4()`; seed a random generator of your own: `random.Random(0)`.
    """
    for how, found in (
        ("loaded twice", subject.load(subject.names)),
        ("built again, its splits loaded in the other order", subject.load(subject.names[::-1], subject.build())),
        ("here and in another process", subject.there),
    ):
        for name, tasks in subject.rows.items():
            if len(tasks) != len(found[name]):
                raise CheckFailed(f"split {name}, {how}: {len(tasks)} tasks and {len(found[name])}")
            for one, other in zip(tasks, found[name], strict=True):
                same = fingerprint([one]) == fingerprint([other])  # whatever the folders of their files
                if different := "" if same else difference(_contents(one), _contents(other)):
                    raise CheckFailed(f"split {name}, task {one.id}, {how}: {different}")


def check_disjoint(subject: TasksSubject) -> str:
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
    return "; ".join(f"warning: {text}" for text in repeated_warnings(parts))


def check_gold_apart(subject: TasksSubject) -> str:
    """What is in `private` is not in `input` too.

    Why: The agent reads the answer instead of working it out, and accuracy is worthless.
    Cure: Put what only the reward may know into `private` alone. If the agent may know a key: `agentrig validate …
        --shared KEY`, and `checks("tasks", …, shared=["KEY"])` in the package's tests/test_contract.py; `input.KEY`
        for a table that only tools read.
    """
    parts = dict[str, None]()
    for name, tasks in subject.rows.items():
        keys = {key for task in tasks for key in task.private if key not in subject.shared}
        for key in sorted(keys):
            golds = [(task, task.private.get(key)) for task in tasks if texts_of(task.private.get(key))]
            found = _given_away(golds, subject.shared)
            if len({str(gold) for _, gold in golds}) > 1 and len(found) >= 0.9 * len(golds):  # fewer may be by chance
                task, gold, place = found[0]
                raise CheckFailed(
                    f'split {name}: private["{key}"] is in the input of {len(found)} of {len(golds)} tasks; the first: '
                    f"{task.id}, {cut(repr(gold), 60)} at {place}{_if_table([place for _, _, place in found])}"
                )
            parts |= {f'input.{part} is a part of private["{key}"]': None for part in _parts_of(golds, subject.shared)}
    more = "in nearly all tasks: may the agent know it? Make it private too if not (of a table: tasks.private)"
    return "; ".join(f"warning: {part} {more}" for part in parts)


def _parts_of(golds: Sequence[tuple[Task, Any]], shared: Sequence[str]) -> Iterator[str]:
    """Yield the keys of the input whose text stands in the gold, as a whole word or several, in nearly all tasks."""
    for key in sorted({key for task, _ in golds for key in task.input} - {*shared}):
        pairs = [(task.input.get(key), gold) for task, gold in golds]
        texts = [(a, gold) for a, gold in pairs if isinstance(a, str) and isinstance(gold, str) and len(a) > 1]
        inside = [a for a, gold in texts if re.search(rf"(?<!\w){re.escape(a)}(?!\w)", gold)]
        if len(set(inside)) > 1 and len(inside) >= 0.9 * len(golds):
            yield key


def _given_away(golds: Sequence[tuple[Task, Any]], shared: Sequence[str]) -> list[tuple[Task, Any, str]]:
    """Return the tasks whose input has the gold, each with the gold and its place.

    One text of a list may be the whole answer, if the others are other ways to say it. It counts where it is at one and
    the same place in all tasks: at places that differ it is an entry of a table, and the other texts are not beside it.
    """
    whole, one = [], []
    for task, gold in golds:
        given = {key: value for key, value in task.input.items() if f"input.{key}" not in shared}
        if place := _place_of(gold, given):
            whole.append((task, gold, place))
        elif isinstance(gold, list | tuple):
            one += [(task, gold, place) for text in gold if (place := _place_of(text, given))][:1]
    usual = Counter(place for _, _, place in one).most_common(1)
    return whole + [each for each in one if each[2] == usual[0][0]]


def _place_of(gold: Any, given: Any) -> str:
    """Return where an input has a gold, of which all parts must be beside one another; '' if nowhere.

    A text inside a longer one counts from `LONG` characters on, and so does the first part of a gold by itself.
    """
    parts = texts_of(gold)
    if parts and len(parts[0]) >= LONG:
        parts = parts[:1]
    for place, value in _values(given, "input"):
        if not isinstance(value, dict | list | tuple):
            text = str(value)
            if len(parts) == 1 and (text == parts[0] or (len(parts[0]) >= LONG and parts[0] in text)):
                return place
        elif len(parts) > 1 and (texts_of(value) == parts or _beside(parts, value)):
            return place
    return ""


def _beside(parts: Sequence[str], value: dict[str, Any] | Sequence[Any]) -> bool:
    """Return whether the entries of a list or dict have all parts; those of a list in their order, without a gap."""
    inner = value.values() if isinstance(value, dict) else value
    texts = [str(each) for each in inner if not isinstance(each, dict | list | tuple)]
    if isinstance(value, dict):
        return set(parts) <= set(texts)
    return any(texts[i : i + len(parts)] == parts for i in range(len(texts)))


def _values(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yield a JSON value and all that it holds, each with its place: `input.houses[3].id`."""
    yield place, value
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _values(inner, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from _values(inner, f"{place}[{i}]")


def _if_table(places: Sequence[str]) -> str:
    """Return what to do if the places are entries of a table: other ones in other tasks; '' if they are not."""
    tables = {place.partition("[")[0] for place in places if "[" in place}
    if len(tables) != 1 or len(set(places)) == 1:
        return ""
    field = ".".join(tables.pop().split(".")[:2])
    return f", and elsewhere in others. If that is a table that only tools read: --shared {field}"


def _contents(task: Task) -> dict[str, Any]:
    return {"id": task.id, "input": dict(task.input), "private": dict(task.private), "row": task.row}
