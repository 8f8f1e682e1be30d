"""Splits: which split has which role; all rows are loaded and checked before anything else starts."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from agentrig.errors import AgentrigError, ConfigError, PluginError, nearest, place_of
from agentrig.plan import TASKS_CURE, TASKS_SLOW_S, RunSettings
from agentrig.plugins.loading import told_if_slow
from agentrig.processes.put_back import left_alone, torch_put_back
from agentrig.run.damage import read_object
from agentrig.tasks import ROLES, Task, Tasks, by_input, input_key, overlap, repeated
from agentrig.text import DEPTH_LIMIT, LARGE_WORDS, TOO_LARGE, amount, cut, words_of
from agentrig.traces import mapping

WITHOUT = {
    "validation": "nothing is measured while training",
    "report": "no accuracy before and after training can be stated",
}
"""What an empty split means, by role; without training tasks no run starts."""

WARM_UP = "warmup.json"
"""The file in a starting model's directory that says which tasks it was shown the answers of."""


def split_of(settings: RunSettings, tasks: Tasks, role: str) -> str:
    """Return the split of a role: from the run's settings, else from the task set; '' for none."""
    return str(getattr(settings, role) or tasks.roles.get(role, ""))


def read_split(tasks: Tasks, split: str, *, who: str, key: str = "") -> Sequence[Task]:
    """Load a split and check every row.

    Args:
        key: The setting that selected it, for the message.

    Raises:
        ConfigError: The task set has no such split.
        PluginError: `load` raised, or a row is not a valid `Task`; the message names task set, split, row and field.
    """
    if split not in tasks.splits:
        hint = nearest(split, tasks.splits)
        raise ConfigError(
            f'{key and f"{key}: "}there is no split "{split}".{hint} The splits are {", ".join(tasks.splits)}'
        )
    where = f"{who}, split {split}"
    try:
        with (
            told_if_slow(f"loading the tasks of {where}", after_s=TASKS_SLOW_S),
            left_alone(f"`load` of {where},", TASKS_CURE),
            torch_put_back(f"`load` of {where}"),
        ):
            return _checked(tasks.load(split), where)
    except AgentrigError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(f"{where}: `load` raised {words_of(error)}{place_of(error)}") from error


def load_splits(tasks: Tasks, run: RunSettings, *, who: str) -> dict[str, tuple[str, Sequence[Task]]]:
    """Load the tasks of each role.

    Returns:
        Role to the split's name and its tasks; a role without a split has the name '' and no tasks.
    """
    read: dict[str, Sequence[Task]] = {}
    loaded = {}
    for role in ROLES:
        split = split_of(run, tasks, role)
        if split and split not in read:
            read[split] = read_split(tasks, split, who=who, key=f"run.{role}")
        rows = read[split] if split else ()
        if role == "train" and not rows and role not in getattr(tasks, "optional", ()):
            named = f'split "{split}" has no tasks' if split else "the task set names no split for it"
            more = other_split(tasks, split, "run.train=SPLIT", who=who)
            raise ConfigError(f"{who}: there is nothing to learn from: {named}.{more}")
        limit = getattr(run, f"{role}_tasks")
        loaded[role] = (split, rows[:limit] if limit else rows)
    return loaded


def other_split(tasks: Tasks, empty: str, setting: str, *, who: str) -> str:
    """Return why a split is empty, if the task set knows, and the advice to name another one, or that all are empty.

    Args:
        empty: The empty split; '' if none is named.
    """
    filled = []
    for split in tasks.splits:
        try:
            filled += [split] if len(read_split(tasks, split, who=who)) else []
        except AgentrigError:  # told when it is named
            filled.append(split)
    if not filled:
        return f"\n  None of its splits has a task ({', '.join(tasks.splits)}): give it data"
    why = why_empty(tasks, empty)
    lines = [*([why] if why else []), f"{'Or name' if why else 'Name'} another: {setting}, one of {', '.join(filled)}"]
    return "".join(f"\n  {line}" for line in lines)


def why_empty(tasks: Any, split: str) -> str:
    """Return what a task set says of why a split ('' if none is named) has no tasks, and what to do; '' if nothing."""
    says = getattr(tasks, "why_empty", None)
    return str(says(split)) if says is not None else ""


def labelled(model: object) -> set[str]:
    """Return the inputs (`agentrig.tasks.input_key`) of tasks whose answers a starting model has learned.

    Args:
        model: The setting `algorithm.model`: the directory of a warm-up, or a checkpoint of a run that began with one.
    """
    folder, found = Path(str(model)).expanduser(), set[str]()
    if folder.parent.name == "checkpoints":
        begun = read_object(folder.parents[1] / "manifest.json").get("model")
        return labelled(begun) if begun and begun != model else found
    return found.union(map(str, read_object(folder / WARM_UP).get("inputs", ())))


def labels_among(tasks: Sequence[Task], model: object) -> int:
    """Return how many of these tasks a starting model has learned the answers of."""
    known = labelled(model)
    return sum(input_key(task) in known for task in tasks) if known else 0


def label_warnings(splits: Mapping[str, tuple[str, Sequence[Task]]], model: object) -> list[str]:
    """Return the warning that held-out tasks were labels of the warm-up that made the starting model, if any were.

    A warm-up labels no held-out task of its own splits; other shares, or another file, can make one of a label.
    """
    known = labelled(model)
    if not known:
        return []
    seen = {role: [task for task in splits[role][1] if input_key(task) in known] for role in ("validation", "report")}
    told = [f"{len(tasks)} of {len(splits[role][1])} {role} tasks" for role, tasks in seen.items() if tasks]
    if not told:
        return []
    first = next(tasks[0] for tasks in seen.values() if tasks)
    return [
        f"{' and '.join(told)} were labels of the warm-up that made {model}, so their accuracy is that of tasks whose "
        f"answers the model has seen; the first: {first.place or first.id}. Make the model again with the splits of "
        "this run (agentrig warmup --out ANOTHER_DIR), or split the tasks as it did (tasks.shares)"
    ]


def start_warnings(model: object) -> list[str]:
    """Return the warning that the warm-up that made the starting model advised against training it; the model's own."""
    made = read_object(Path(str(model)).expanduser() / WARM_UP)
    if made.get("ready", True):
        return []
    verdict = mapping(made.get("verdict"))
    told = str(verdict.get("message") or "it is not ready").splitlines()[0]
    return [f"agentrig warmup said of {model}: {told.partition('. ')[0]} ({WARM_UP} there says what to do)"]


def split_warnings(
    splits: Mapping[str, tuple[str, Sequence[Task]]], tasks: Any, run: RunSettings | None = None
) -> list[str]:
    """Return warnings about splits that are empty or share tasks, and about validation on test data.

    Args:
        run: The run's settings: a limit of tasks where there are none is told. None for no limits.
    """
    warnings = []
    held_out = getattr(tasks, "held_out", ("test",))
    validation = splits["validation"][0]
    if validation in held_out:
        warnings.append(
            f'this run validates on "{validation}", a split that is held out for final figures: what is chosen by it '
            "can't be reported on it"
        )
    if splits["report"][0] == validation:
        if splits["validation"][1]:
            others = " or ".join(split for split in tasks.splits if split not in (validation, splits["train"][0]))
            warnings.append(
                f'this run validates and reports on one split, "{validation}": what is chosen by it looks better there '
                f"than it is{f'; set run.report to {others}' if others else ''}"
            )
    else:
        shared = overlap(splits["validation"][1], splits["report"][1])
        if shared:
            warnings.append(_shared(shared, splits["report"][1], "report", "validation"))
    warnings += repeated_warnings(splits)
    trained = by_input(splits["train"][1])
    for role in ("validation", "report"):
        split, rows = splits[role]
        limited = f"run.{role}_tasks" if run is not None and getattr(run, f"{role}_tasks") else ""
        if not rows and (limited or role not in getattr(tasks, "optional", ())):
            named = f"{limited} has nothing to choose from: " if limited else ""
            named += f'the {role} split "{split}" has no tasks' if split else f"no split serves {role}"
            why = why_empty(tasks, split)
            another = f"name another with run.{role}=SPLIT"
            warnings.append(f"{named}: {WITHOUT[role]}; {f'{why}; or ' if why else ''}{another}")
        shared = overlap(trained, rows)
        if shared and not getattr(tasks, "measures_training", False):
            warnings.append(_shared(shared, rows, role, "training"))
    return warnings


def repeated_warnings(splits: Mapping[str, tuple[str, Sequence[Task]]]) -> list[str]:
    """Return warnings about roles whose tasks have one input several times."""
    warnings = []
    for role, (_, rows) in splits.items():
        again = repeated([task for task in rows if task.place])  # rows of data; other task sets may repeat on purpose
        if again:
            unlike = sum(first.private != task.private for first, task in again)
            warnings.append(
                f"{len(again)} of {len(rows)} {role} tasks have the input of another one"
                f"{f', {unlike} of them with another private part' if unlike else ''}: "
                f"{'; '.join(f'{task.place} repeats {first.place}' for first, task in again[:2])}"
            )
    return warnings


def few_warnings(tasks: Sequence[Task], algorithm: Any) -> list[str]:
    """Return the warning that a step repeats tasks, because there are fewer to train on than it takes.

    Args:
        tasks: Those of the training split.
        algorithm: Its settings; without `tasks_per_step`, or with demonstrations, there is no warning.
    """
    n = getattr(algorithm, "tasks_per_step", 0)
    if getattr(algorithm, "demonstrations", "") or not isinstance(n, int) or not 0 < len(tasks) < n:
        return []
    return [
        f"{amount(len(tasks), 'task')} to train on: each step has {n} (algorithm.tasks_per_step), so it repeats them, "
        f"and the training accuracy is that of tasks which the model learns by heart. Use at least {n} training tasks"
    ]


def _shared(shared: Sequence[tuple[Task, Task]], rows: Sequence[Task], role: str, other: str) -> str:
    first = shared[0][1]
    where = first.place or cut(repr(first.id)[1:-1], 100)
    return f"{len(shared)} of {len(rows)} {role} tasks are in the {other} split too; the first: {where}"


def _checked(rows: Any, where: str) -> list[Task]:
    """Return the rows as a list of our own: it, and its rows, may be of a class that gives others each time."""
    if isinstance(rows, str | bytes | Mapping) or not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
        raise PluginError(f"{where}: `load` returned {_no_rows(rows)} It must return a list of agentrig.Task objects")
    tasks: list[Any] = []
    seen: dict[str, int] = {}
    for number, row in enumerate(rows):
        task, problem, place = row, None, ""
        try:
            task = _own(row)
            place = task.place if isinstance(task, Task) and isinstance(task.place, str) else ""
            task, problem = _plain_task(task)
        except _Unread as unread:
            problem = str(unread)
        except Exception as error:  # a mapping's own methods may raise anything
            problem = f"it cannot be read: {words_of(error)}{place_of(error)}"
        tasks.append(task)
        if problem is None and (first := seen.setdefault(task.id, number)) != number:
            problem = f'id is "{task.id}", which row {first} has too; ids must be unique within a split'
        if problem is not None:
            raise PluginError(f"{where}, {place or f'row {number} (the first is 0)'}: {problem}")
    return tasks


def _no_rows(returned: Any) -> str:
    """Say what `load` returned that is no list of rows, and why it may have."""
    if returned is None:
        return "None; is a `return` missing?"
    if inspect.iscoroutine(returned):
        returned.close()  # else Python warns that nobody awaited it
    if inspect.iscoroutine(returned) or inspect.isasyncgen(returned):
        return "nothing yet, because it is an `async def`; write `def load(self, split):`, and await nothing in it."
    kind = type(returned).__name__
    if isinstance(returned, str | bytes) or not isinstance(returned, Iterable):
        return f"{returned!r:.80} ({kind})."
    return f"a {kind}; write `return list({'rows.values()' if isinstance(returned, Mapping) else '...'})`."


class _Unread(Exception):
    """A field of a task cannot be read."""


def _own(row: Any) -> Any:
    """Return a plain task whose fields were read once, as plain dicts where they are mappings; or no task as it is."""
    if not isinstance(row, Task):
        return row
    values: dict[str, Any] = {}
    for field in attrs.fields(Task):
        try:
            value = getattr(row, field.name)
            odd = isinstance(value, Mapping) and type(value) is not dict and field.name != "row"
            values[field.name] = dict(value.items()) if odd else value
        except (Exception, SystemExit) as error:
            raise _Unread(
                f"its {field.name} cannot be read ({words_of(error)}{place_of(error)}). Does {type(row).__name__} "
                "call super().__init__? Or write agentrig.Task(id=..., input={...}, private={...})"
            ) from error
    same = type(row) is Task and all(getattr(row, name) is value for name, value in values.items())
    return row if same else Task(**values)


def _problem(task: Any) -> str | None:
    """Say what is wrong with a row, or None."""
    if not isinstance(task, Task):
        return f"it is a {type(task).__name__}; write agentrig.Task(id=..., input={{...}}, private={{...}})"
    if not isinstance(task.id, str):
        example = "task-0" if task.id is None else task.id
        return f'id is {task.id!r:.80} ({type(task.id).__name__}); it must be text, for example "{example}"'
    if not task.id:
        return 'id is empty; give every task an id of its own, for example "task-0"'
    if problem := json_problem(task.id, "id"):
        return problem
    for field in ("input", "private"):
        value = getattr(task, field)
        if not isinstance(value, Mapping):
            return f"{field} is a {type(value).__name__}; it must be a dict"
    if not isinstance(task.root, str):
        return f"root is a {type(task.root).__name__}; it must be text: write str(FOLDER)"
    if not isinstance(task.slices, Mapping) or not all(isinstance(x, str) for kv in task.slices.items() for x in kv):
        return f"slices is {task.slices!r:.80}; it must be a dict of text"
    return json_problem(dict(task.slices), "slices")


def _plain_task(task: Any) -> tuple[Any, str | None]:
    """Return a task with plain JSON values, and what is wrong with it, or None.

    Values of subclasses, such as `numpy.float64` or an `Enum` of text, become what JSON writes for them: another
    process may not know their class.
    """
    if problem := _problem(task):
        return task, problem
    plain: dict[str, Any] = {}
    for field in ("input", "private", "row"):
        value = getattr(task, field)
        check = JsonCheck(field, CURES_OF_COLUMNS if task.place else CURES)
        if problem := check.problem(dict(value) if isinstance(value, Mapping) else value, field):
            return task, problem
        if check.subclasses:
            plain[field] = plain_types(value)
    return attrs.evolve(task, **plain) if plain else task, None


CURES: Mapping[str, str] = {
    "set": "write sorted(...)",
    "frozenset": "write sorted(...)",
    "bytes": "write .decode()",
    "Decimal": "write float(...)",
    "float": "write None",
    "": "write text, a number, a list or a dict",
}
"""What to do with a value that is no JSON value, by its type; '' for all others."""

CURES_OF_COLUMNS: Mapping[str, str] = {
    "Decimal": "store the column as floating-point numbers",
    "float": "write null (in Python: None)",
    "": "store the column as text",
}
"""The same for a value in rows of data, such as a Parquet file's."""


VALUES_LIMIT = 1_000_000
"""Most values in a part of a task, counted as JSON writes them: a list that is in it twice counts twice."""


def json_problem(value: Any, path: str) -> str | None:
    """Say which part of a value, which messages call `path`, is not JSON, and what to do; None if all parts are."""
    return JsonCheck(path, CURES).problem(value, path)


class JsonCheck:
    """Looks through a value for what is not JSON.

    Args:
        name: What messages call the whole value.
        cures: What to do, by type: `CURES`, or `CURES_OF_COLUMNS` for data that no code of the user makes.

    Attributes:
        subclasses: Whether a value was of a subclass, such as an `Enum` of text, so that JSON gives another type.
    """

    def __init__(self, name: str, cures: Mapping[str, str]) -> None:
        self._name, self._cures = name, cures
        self._left = VALUES_LIMIT
        self.subclasses = False

    def problem(self, value: Any, path: str, depth: int = 1) -> str | None:
        """Say which part of a value is not JSON, and what to do; None if all parts are.

        Args:
            value: The value.
            path: What the message calls it.
            depth: How many lists and dicts there are from the whole value to this one, if it is one.
        """
        self._left -= 1
        if self._left < 0:
            return (
                f"{self._name} has more than {VALUES_LIMIT} values, as JSON writes them; "
                "put them into a file, and give its path"
            )
        if value is None or isinstance(value, bool):
            return None
        self.subclasses |= type(value) not in (str, int, float, dict, list, tuple)
        if isinstance(value, int):
            return f"{path} is {LARGE_WORDS}; write text" if abs(value) >= TOO_LARGE else None
        if isinstance(value, str):
            return _half_character(value, path)
        if isinstance(value, float):
            return None if math.isfinite(value) else f"{path} is {value}, which JSON can't hold; {self._cures['float']}"
        if not isinstance(value, dict | list | tuple):
            cure = self._cures.get(type(value).__name__, self._cures[""])
            return f"{path} is {value!r:.80} ({type(value).__name__}), no JSON value; {cure}"
        if depth > DEPTH_LIMIT:
            return f"{self._name} contains itself, or is nested deeper than {DEPTH_LIMIT} lists or dicts"
        if not isinstance(value, dict):
            problems = (self.problem(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value))
            return next((problem for problem in problems if problem is not None), None)
        for key, item in value.items():
            if not isinstance(key, str):
                return f"{path} has the key {key!r:.80} ({type(key).__name__}); keys must be text"
            self.subclasses |= type(key) is not str
            problem = _half_character(key, f"a key of {path}") or self.problem(item, f"{path}.{key}", depth + 1)
            if problem is not None:
                return problem
        return None


def _half_character(text: str, path: str) -> str | None:
    if text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text):
        return None
    return f"{path} holds a lone surrogate, half of a character, which no file can hold: {json.dumps(text)[:80]}"


def plain_types(value: Any) -> Any:
    """Return JSON values with those of subclasses as what they are in JSON: text, numbers, dicts, lists."""
    if isinstance(value, Mapping):
        return {str.__str__(key): plain_types(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (tuple if isinstance(value, tuple) else list)(plain_types(item) for item in value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # `str(value)` is "Color.RED" for an Enum
    return int.__int__(value) if isinstance(value, int) else float.__float__(value)
