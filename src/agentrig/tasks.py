"""Tasks: the rows of data that agents run on."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import random
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import attrs

from agentrig.errors import ConfigError, PluginError, nearest
from agentrig.rows import is_written_number, read_rows
from agentrig.settings import setting, structure
from agentrig.text import amount, cut, json_kind, words_of

T = TypeVar("T")

ROLES = ("train", "validation", "report")
"""What the splits of a task set are for; see `Tasks`."""


@attrs.frozen(kw_only=True)
class Task:
    """One row of data in two parts: one for the agent, one for the reward only.

    Attributes:
        id: Unique within its task set, and the same in every process and run.
        input: JSON values only; all that an agent gets.
        private: JSON values only (gold SQL, answers); only the reward gets it.
        row: A JSON value: the row as its data has it, under the data's own names. Only an agent whose spec asks for
            whole rows gets it (`AgentSpec.whole_rows`). With None, that agent gets `private` and `input` together.
        slices: What figures are broken down by: a name to this task's class, for example `{"difficulty": "hard"}`.
            Text only; it is written into a run's records, and no agent gets it.
        place: Where it comes from, for messages: the file and the line.
        root: The folder of the task set's own files, if other fields name some: each text that is this path, or begins
            with it and `/`, is a file of the task set. Another machine or cache may have the same files under another
            root: it is recorded with each rollout, and `under` gives the task as it was there. Without it, a run whose
            tasks have absolute paths can be resumed and audited only while their files are where they were.
    """

    id: str
    input: Mapping[str, Any]
    private: Mapping[str, Any] = attrs.field(factory=dict, repr=False)
    row: Any = attrs.field(default=None, repr=False)
    slices: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    place: str = attrs.field(default="", repr=False, eq=False)
    root: str = attrs.field(default="", repr=False, eq=False)

    def under(self, root: str) -> Task:
        """Return the task with its files under another root; as it is if one of the two is not known."""
        old, new = self.root.rstrip("/"), root.rstrip("/")
        if not old or not new or old == new:
            return self

        def moved(value: Any) -> Any:
            if isinstance(value, str):
                return new + value[len(old) :] if value == old or value.startswith(f"{old}/") else value
            if isinstance(value, Mapping):
                return {key: moved(item) for key, item in value.items()}
            return [moved(item) for item in value] if isinstance(value, list | tuple) else value

        return Task(
            id=self.id,
            input=moved(self.input),
            private=moved(self.private),
            row=moved(self.row),
            slices=self.slices,
            place=self.place,
            root=root,
        )

    def given(self, *, whole: bool) -> Any:
        """Return what an agent gets: `input`, or the whole row, with its gold."""
        if not whole:
            return self.input
        return {**self.private, **self.input} if self.row is None else self.row

    def input_text(self) -> str:
        """Return the input as JSON text: about the least that an agent tells the model."""
        return json.dumps(dict(self.input), ensure_ascii=False, default=str)


FIELDS_SHOWN = 200
"""Most characters of the names of a task's fields in a message."""


def field_hint(error: BaseException, *, answer: Any = None, place: str = "", **parts: Any) -> str:
    """Return which fields a task has, or which of them hold numbers, if that may explain an error; else ''.

    Args:
        error: What an agent or a reward raised: for a key that is not there, or a number in place of a text.
        answer: What the reward judged: a number in it may be the one in question, so it gives no hint on the task's.
        place: The task's place; '' if it is not known. Only columns of a CSV file can be read as text.
        parts: What the agent or reward got of the task: `input`, `private`. What is no mapping is left out.
    """
    known = {part: fields for part, fields in parts.items() if isinstance(fields, Mapping)}
    _, _, text = words_of(error).partition(": ")
    if isinstance(error, KeyError) and not all(text.strip("'\"") in fields for fields in known.values()):
        names = (f"{', '.join(map(str, fields)) or 'nothing'} in {part}" for part, fields in known.items())
        return f"; the task has {cut(' and '.join(names), FIELDS_SHOWN)}"
    told = re.search(r"\b(int|float)\b", text) if isinstance(error, TypeError | AttributeError) else None
    found = [name for f in known.values() for name, value in f.items() if told and type(value).__name__ == told[1]]
    if not found or (told and told[1] in _types_in(answer)) or (place and not _in_csv(place)):
        return ""
    numbers = f"{found[0]} is a number" if len(found) == 1 else f"{', '.join(found)} are numbers"
    return f"; the task's {numbers}: to read it from a CSV file as text, set tasks.text={json.dumps(found)}"


def _types_in(value: Any) -> set[str]:
    """Return the names of the types of a JSON value and of all that it holds."""
    values = [value]
    for each in values:
        values += each.values() if isinstance(each, Mapping) else each if isinstance(each, list | tuple) else ()
    return {type(each).__name__ for each in values}


class Tasks(Protocol):
    """A set of tasks with named splits; what `TasksSpec.build` returns.

    Attributes:
        splits: The names that `load` knows.
        roles: The split of each role: `train` (trained on), `validation` (measured during
            training; use it to choose settings) and `report` (held out; the accuracy of
            `summary.json`). The `[run]` keys `train`, `validation`, `report` override it.
    """

    splits: Sequence[str]

    @property
    def roles(self) -> Mapping[str, str]:
        """Role to split; may be a plain attribute."""

    def load(self, split: str) -> Sequence[Task]:
        """Return the split's tasks in a stable order.

        Raises:
            agentrig.errors.AgentrigError: The data is missing; the message names the command that creates it.
        """


def check_set(tasks: Any, who: str) -> None:
    """Check the `splits`, `roles` and `held_out` of a task set.

    Raises:
        PluginError: One is missing or wrong; the message has an example, or the names of the splits.
    """
    if isinstance(tasks, type) and inspect.isfunction(inspect.getattr_static(tasks, "load", None)):
        name = tasks.__name__
        raise PluginError(f"{who}: `build` returned the class {name}, not one of its objects; write `return {name}()`")
    splits, roles = (_attribute(tasks, name, who) for name in ("splits", "roles"))
    held_out = _attribute(tasks, "held_out", who, ())
    names = isinstance(splits, Sequence) and not isinstance(splits, str) and all(isinstance(s, str) for s in splits)
    if not names or not splits:
        raise PluginError(
            f'{who}: `splits` is {splits!r:.80}; write the names of the splits: splits = ("train", "test")'
        )
    if not isinstance(roles, Mapping):
        able = ROLES if len(splits) > 2 else ("train", "report")
        example = ", ".join(f'"{role}": "{split}"' for role, split in zip(able, splits, strict=False))
        raise PluginError(
            f"{who}: `roles` is {roles!r:.80}; write which split serves which role: roles = {{{example}}}"
            + ("; held-out tasks need a split of their own" if len(splits) < 2 else "")
        )
    for role, split in roles.items():
        if role not in ROLES or split not in splits:
            raise PluginError(
                f"{who}: `roles` has {role!r}: {split!r}; the roles are {', '.join(ROLES)}, the splits are "
                f"{', '.join(splits)}"
            )
    listed = isinstance(held_out, Collection) and not isinstance(held_out, str | Mapping)
    if not listed or not all(split in splits for split in held_out):
        none = "; if no split is held out, write held_out = ()" if held_out is None else ""
        raise PluginError(
            f"{who}: `held_out` is {held_out!r:.80}, not a list of these splits: {', '.join(splits)}{none}"
        )


def _attribute(tasks: Any, name: str, who: str, default: Any = None) -> Any:
    try:
        return getattr(tasks, name, default)
    except Exception as error:  # a property may raise anything
        raise PluginError(f"{who}: `{name}` raised {words_of(error)}") from error


def fingerprint(tasks: Sequence[Task]) -> str:
    """Return the SHA-256 (hex) of the tasks' ids, inputs and private parts, paths left out.

    Absolute paths differ between machines, so only the last component of a string value that
    starts with `/` counts.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, str) and value.startswith("/"):
            return value.rsplit("/", 1)[-1]
        if isinstance(value, Mapping):
            return {k: plain(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [plain(v) for v in value]
        return value

    digest = hashlib.sha256()
    for task in tasks:
        row = [task.id, plain(task.input), plain(task.private)]
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def by_input(tasks: Iterable[Task]) -> dict[str, Task]:
    """Return the first task of each input, by `input_key`."""
    known: dict[str, Task] = {}
    for task in tasks:
        known.setdefault(input_key(task), task)
    return known


def overlap(one: Sequence[Task] | Mapping[str, Task], other: Sequence[Task]) -> list[tuple[Task, Task]]:
    """Return the tasks of `other` whose input also occurs in `one`, each after the first task there that has it.

    A whole number equals itself written as a float: a column of a file may be of the one kind here, of the other there.

    Args:
        one: Tasks, or what `by_input` returned for them.
        other: Tasks.
    """
    known = one if isinstance(one, Mapping) else by_input(one)
    found = ((known.get(input_key(task)), task) for task in other)
    return [(first, task) for first, task in found if first is not None]


def repeated(tasks: Sequence[Task]) -> list[tuple[Task, Task]]:
    """Return the tasks whose input an earlier one has, each after the first that has it."""
    return [(first, task) for first, task in overlap(tasks, tasks) if first is not task]


def input_key(task: Task) -> str:
    """Return what is the same for tasks with the same input, whatever their ids and private parts."""

    def same(value: Any) -> Any:
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, Mapping):
            return {k: same(v) for k, v in value.items()}
        return [same(v) for v in value] if isinstance(value, list | tuple) else value

    return fingerprint([Task(id="", input=same(task.input))])


def tasks_of_rows(
    rows: Sequence[Any], place: Callable[[int], str], *, split: str, gold: Sequence[str] = ()
) -> list[Task]:
    """Return rows of data as tasks; a wrong row is named by its place and column.

    The column `id`, if there is one, gives the task's id, and agents do not get it: two splits with ids of their own
    could not be compared otherwise. Without it, ids are row numbers.

    Args:
        rows: Mappings of columns; anything else, for example a text, is a column `input`.
        place: Gives the place of the row of a number.
        split: Their split; ids begin with it.
        gold: The columns that only the reward gets.

    Raises:
        ConfigError: A row lacks a gold column, or its gold is empty, or its id is empty or another row's too.
    """
    tasks: list[Task] = []
    ids: dict[str, int] = {}
    for number, row in enumerate(rows):
        columns: Mapping[str, Any] = row if isinstance(row, Mapping) else {"input": row}
        absent = [column for column in gold if column not in columns]
        if absent:
            raise ConfigError(
                f"{place(number)}: there is no gold column {', '.join(absent)}; its columns are "
                f"{', '.join(map(str, columns))}"
            )
        if gold and all(_empty(columns[column]) for column in gold):
            raise ConfigError(
                f"{place(number)}, column {' and '.join(gold)} is {_emptiness(*(columns[column] for column in gold))}: "
                "a reward has nothing to compare an answer with. Fill it in, or remove the row"
            )
        name = f"{number:05d}"
        if "id" in columns and "id" not in gold:
            name = str(columns["id"])
            if _empty(columns["id"]):
                raise ConfigError(
                    f"{place(number)}, column id is {_emptiness(columns['id'])}; give every row an id, or remove the "
                    "column"
                )
            if ids.setdefault(name, number) != number:
                raise ConfigError(
                    f'{place(number)}, column id: "{name}" is the id of {place(ids[name]).rpartition(", ")[2]} too; '
                    "give every row an id of its own, or remove the column"
                )
        tasks.append(
            Task(
                id=f"{split}-{name}",
                input={key: value for key, value in columns.items() if key not in (*gold, "id")},
                private={key: columns[key] for key in gold},
                row=row,
                place=place(number),
            )
        )
    return tasks


def _empty(value: Any) -> bool:
    return value is None or value != value or (isinstance(value, str) and not value.strip())  # NaN is not itself


def _emptiness(*values: Any) -> str:
    """Say how empty values are empty: NaN is a value of its own in a file, and a missing one in a data frame."""
    return "empty (NaN)" if any(value != value for value in values) else "empty"


SPLITS: Mapping[str, str] = {"train": "train", "validation": "validation", "report": "test"}
"""The split of each role of a table."""


@attrs.frozen(kw_only=True)
class Columns:
    """What the columns of a table are for."""

    input: list[str] = setting(list, help="columns that the agent gets; empty: all but those of private, id and split")
    private: list[str] = setting(list, help="columns that only the reward gets, such as the right answer")
    id: str = setting("", help="column of the rows' ids; empty: `id` if there is one, else row numbers")
    split: str = setting("", help="column that says train, validation or test; empty: by files or shares")
    shares: list[float] = setting(
        lambda: [0.8, 0.1, 0.1], help="shares of train, validation and test, of one file without a column of splits"
    )
    slices: list[str] = setting(list, help="columns by which accuracy is broken down")


@attrs.frozen(kw_only=True)
class TableConfig(Columns):
    """Settings of `table`."""

    file: str = setting("", help="CSV, Parquet, JSON Lines, JSON or Arrow file of the rows; from the current folder")
    validation: str = setting("", help="a file of the validation rows; file then has those to train on")
    test: str = setting("", help="a file of the held-out rows")
    text: list[str] = setting(list, help="columns of a CSV file that hold text even where it looks like a number")


class Table:
    """Rows with named columns as a task set; implements `Tasks`.

    Args:
        tables: Rows, and what gives the place of the row of a number, for messages; by split. With the split `train`
            alone, its rows are shared out: by the column `columns.split`, or by `columns.shares`. Rows with one input
            come into one split, the same in every run.

    Raises:
        ConfigError: A column is both for the agent and for the reward only, or the shares are not three numbers that
            add up to 1.
    """

    splits: Sequence[str] = tuple(SPLITS.values())
    roles: Mapping[str, str] = SPLITS

    def __init__(
        self,
        tables: Mapping[str, tuple[Sequence[Mapping[str, Any]], Callable[[int], str]]],
        columns: Columns,
    ) -> None:
        shares = columns.shares
        if len(shares) != len(SPLITS) or min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
            kind = "three numbers from 0 on" if min(shares, default=0) < 0 else "three numbers"
            raise ConfigError(f"the shares are {list(shares)}; write {kind} that add up to 1, such as 0.8, 0.1, 0.1")
        whole, other = len(tables) == 1, next((split for split in tables if split != "train"), "")
        if columns.split and not whole:
            raise ConfigError(
                f"tasks.split has no effect beside tasks.{other}: each file is a split. Leave one of them out"
            )
        if list(shares) != Columns().shares and (columns.split or not whole):
            lacking = " ".join(f"tasks.{split}=FILE" for split in self.splits if split not in tables)
            instead = f", and give the other split a file too: {lacking}" if lacking and not whole else ""
            raise ConfigError(
                f"tasks.shares has no effect beside tasks.{'split' if whole else other}: leave it out{instead}"
            )
        if both := [name for name in columns.input if name in columns.private]:
            raise ConfigError(
                f"column {both[0]} is in tasks.input and in tasks.private: either the agent gets it, or only the "
                "reward does. Take it out of one of them"
            )
        self._tables, self._columns = tables, columns
        self._loaded: dict[str, Sequence[Task]] = {}
        self._kinds: dict[str, dict[str, str]] = {}  # private column to its kinds, each with the place of its first

    def load(self, split: str) -> Sequence[Task]:
        """Return the rows of a split, in their order.

        Raises:
            ConfigError: A row is no object, a column is not there, or a row lacks a private value, an id or a split,
                or a private column holds text and numbers, or a column is text here and holds numbers in a split that
                was loaded before.
        """
        whole = len(self._tables) == 1
        if not whole and split not in self._tables:
            return ()
        rows, place = self._tables["train" if whole else split]
        kept = [self._row(row, place(n)) for n, row in enumerate(rows)]
        self._check_gold(kept, place)
        tasks = [
            attrs.evolve(task, row=None, slices={name: str(row[name]) for name in self._columns.slices})
            for task, row in zip(tasks_of_rows(kept, place, split=split, gold=self._columns.private), rows, strict=True)
            if not whole or self._split_of(task, row) == split
        ]
        check_same_kinds({**self._loaded, split: tasks})
        self._loaded[split] = tasks
        return tasks

    def why_empty(self, split: str) -> str:
        """Say why a split got no rows, and what to do; '' if only its own file knows."""
        if len(self._tables) > 1 or split not in self.splits:
            return ""
        rows, place = self._tables["train"]
        file = (place(0).rpartition(", ")[0] if rows else "") or "the table"
        has = f"{file} has {amount(len(rows), 'row')}"
        if name := self._columns.split:
            return f'{has}, and none has "{split}" in its column {name} (tasks.split)'
        share = self._columns.shares[self.splits.index(split)]
        if not share:
            return f"{has}, and tasks.shares gives none of them to this split"
        each, cure = "row", "Add rows"
        different = len({_input_text(task) for one in self.splits for task in self.load(one)})
        if different < len(rows):
            of = f" (tasks.input = {', '.join(self._columns.input)})" if self._columns.input else ""
            has += f" with {amount(different, 'different input')}{of}; rows with one input stay in one split"
            each, cure = "different input", "Name other columns in tasks.input, add rows with other inputs"
        return (
            f"{has}, and a {each} comes into this split with a chance of {share:.0%} (tasks.shares): with about "
            f"{math.ceil(3 / share)} {each}s it very likely gets one, and a measurement needs hundreds. {cure}, or "
            "give the split a file of its own (tasks.validation=FILE tasks.test=FILE)"
        )

    def _row(self, row: Mapping[str, Any], place: str) -> dict[str, Any]:
        columns = self._columns
        if not isinstance(row, Mapping):
            name = (columns.input or ["question"])[0]
            raise ConfigError(f'{place}: it is {json_kind(row)}; write an object, as {{"{name}": …}}')
        lists = {key: getattr(columns, key) for key in ("input", "private", "slices")}
        names = {**lists, "id": filter(None, [columns.id]), "split": filter(None, [columns.split])}
        named = {name: key for key, those in names.items() for name in those}
        for name, key in named.items():
            if name not in row:
                file = place.rpartition(", line ")[0]
                header = f"{file}, line 1" if file.endswith(".csv") else place  # else each row names its columns
                columns_of = [repr(str(each))[1:-1] for each in row]  # a no-break space looks like none
                blank = next((each for each in map(str, row) if each.strip() == name), "")
                hint = f" It has {blank!r}: remove the white space." if blank else nearest(name, columns_of)
                raise ConfigError(
                    f"{header}: there is no column {name}, which tasks.{key} names.{hint} "
                    f"Its columns are {', '.join(columns_of)}"
                )
        filled = any(not _empty(row[name]) for name in columns.private)  # beside it "" can be a right answer
        for name in columns.private:
            if _empty(row[name]) and not (filled and row[name] == "" and ".csv, " not in place):
                raise ConfigError(
                    f"{place}, column {name} is {_emptiness(row[name])}, and the reward needs it. Fill it in, or "
                    "remove the row"
                )
        hidden = {*columns.private, columns.id, columns.split, "id"}  # not slices: they only measure
        left = [name for name in row if name not in hidden]
        found = {name: row[name] for name in columns.input or left}
        if not set(found) - set(columns.private):
            raise ConfigError(
                f"{place}: no column is left for the agent: it would get nothing of a row. Its columns are "
                f"{', '.join(map(str, row))}, and each has another use (tasks.private, id, split); name one in "
                "tasks.input, or take one out of tasks.private"
            )
        given = columns.id or ("id" if "id" in row else "")
        return found | {name: row[name] for name in columns.private} | ({"id": row[given]} if given else {})

    def _check_gold(self, rows: Sequence[Mapping[str, Any]], place: Callable[[int], str]) -> None:
        """Raise `ConfigError` if a private column is text in one row and a number in another.

        `check_same_kinds` tells of CSV files, each of whose columns is of one kind.
        """
        for column in self._columns.private:
            first = self._kinds.setdefault(column, {})
            for number, row in enumerate(rows):
                kind = json_kind(row[column])
                if kind in ("text", "a number"):
                    first.setdefault(kind, place(number))
                if len(first) > 1 and not all(map(_in_csv, first.values())):
                    other = next(each for each in first if each != kind)
                    raise ConfigError(
                        f"{place(number)}, column {column}: {row[column]!r:.80} is {kind}, and the column holds "
                        f"{other} in {first[other]}: write them alike, because a reward does not take 7 for the text "
                        "'7'"
                    )

    def _split_of(self, task: Task, row: Mapping[str, Any]) -> str:
        if name := self._columns.split:
            if row[name] not in self.splits:
                raise ConfigError(f"{task.place}, column {name}: {row[name]!r:.80} is none of {', '.join(self.splits)}")
            return str(row[name])
        drawn = int.from_bytes(hashlib.sha256(_input_text(task).encode()).digest()[:8]) / 2**64
        train, validation, _ = self._columns.shares
        return self.splits[sum(drawn >= end for end in (train, train + validation))]


def _input_text(task: Task) -> str:
    """Return what decides which split a row comes into by shares."""
    return json.dumps(task.input, sort_keys=True, default=str)


def from_frame(frame: Any, **columns: Any) -> Table:
    """Return a task set of the rows of a pandas `DataFrame`; `columns` are the fields of `Columns`.

    What pandas calls missing, such as NaN, is None: in a file NaN is a value, which no task can have.

    Raises:
        ConfigError: Its columns have several levels, or its index has names; or see `Table`.

    Example:
        ```python
        TasksSpec(name="shop", summary="Orders.", build=lambda config: from_frame(frame, private=["total"]))
        ```
    """
    if getattr(frame.columns, "nlevels", 1) > 1:
        raise ConfigError(f"the frame's columns have {frame.columns.nlevels} levels; give it columns of one name each")
    if named := [str(name) for name in frame.index.names if name is not None]:
        raise ConfigError(f"the frame's index holds {', '.join(named)}, and tasks have columns only: reset_index()")
    given = structure(Columns, columns, owner="a frame", section="from_frame")
    filled = frame.astype(object).where(frame.notna(), None)
    return Table({"train": read_rows(filled.rename(columns=str))}, given)


def check_same_kinds(splits: Mapping[str, Sequence[Task]]) -> None:
    """Raise if a column is text in one split and holds numbers in another: what they share would not be seen.

    The columns of `private` count too if they are of a CSV file: whether they are numbers depends on its cells.

    Raises:
        ConfigError: There is one; the message names a row of each.
    """
    seen: dict[str, tuple[str, bool, Task]] = {}
    for split, tasks in splits.items():
        found: dict[str, Task] = {}
        for task in tasks:
            for column, value in _columns(task).items():
                known = found.get(column)
                if known is None and isinstance(value, int | float | str) and not isinstance(value, bool):
                    found[column] = task
                elif known is not None and _like_a_number(_columns(known)[column]) and not _like_a_number(value):
                    found[column] = task  # this cell made its column text
        for column, task in found.items():
            value = _columns(task)[column]
            text = isinstance(value, str)
            name, other, first = seen.setdefault(column, (split, text, task))
            if other != text:
                mine, theirs = ("text", "a number") if text else ("a number", "text")
                cure = f", or read both as text: tasks.text={json.dumps([column])}" if _in_csv(task.place) else ""
                raise ConfigError(
                    f"{task.place}, column {column}: {value!r:.80} is {mine}, and in split {name} the column holds "
                    f"{theirs} ({first.place}): write them alike{cure}, so that shared tasks are found"
                )


def _columns(task: Task) -> Mapping[str, Any]:
    """Return the values of a task whose kinds must agree between splits."""
    return {**task.private, **task.input} if _in_csv(task.place) else task.input


def _in_csv(place: str) -> bool:
    return re.search(r"\.csv, line \d+$", place, re.IGNORECASE) is not None


def _like_a_number(value: Any) -> bool:
    """Whether a value is a text that a CSV file may hold as a number."""
    return isinstance(value, str) and is_written_number(value)


def tasks_of_step(tasks: Sequence[T], *, n: int, step: int, seed: int) -> list[T]:
    """Return a step's tasks: each epoch shuffles all tasks, and steps take consecutive slices.

    The result depends only on the arguments, so a resumed run continues exactly.

    Args:
        n: Tasks of a step. If there are fewer tasks, some come twice.
        step: From 1.

    Raises:
        ValueError: There are no tasks.
    """
    if not tasks:
        raise ValueError("there are no training tasks")
    chosen: list[T] = []
    place = (step - 1) * n
    while len(chosen) < n:
        epoch, offset = divmod(place, len(tasks))
        order = order_of_epoch(len(tasks), epoch=epoch, seed=seed)
        taken = order[offset : offset + n - len(chosen)]
        chosen += [tasks[i] for i in taken]
        place += len(taken)
    return chosen


def order_of_epoch(n: int, *, epoch: int, seed: int) -> list[int]:
    """Return the numbers below n in the order of an epoch, which counts from 0."""
    order = list(range(n))
    random.Random(f"tasks {seed} {epoch}").shuffle(order)
    return order


def table(config: TableConfig) -> Table:
    """Return the task set.

    Raises:
        ConfigError: No file is named, or see `Table`.
        AgentrigError: A file can't be read; the message names line and column.
    """
    if not config.file:
        raise ConfigError("[tasks] table needs a file of rows: tasks.file=ROWS.csv")
    files = dict(zip(SPLITS.values(), (config.file, config.validation, config.test), strict=True))
    tables = {split: read_rows(file, text=config.text) for split, file in files.items() if file}
    return Table(tables, config)
