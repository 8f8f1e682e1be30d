"""Tasks: the rows of data that agents run on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs


@attrs.frozen(kw_only=True)
class Task:
    """One row of data in two parts: one for the agent, one for the reward only.

    Attributes:
        id: Unique within its task set, and the same in every process and run.
        input: JSON values only; all that an agent gets.
        private: JSON values only (gold SQL, answers); only the reward gets it.
        row: A JSON value: the row as its data has it, under the data's own names. Only an agent whose spec asks for
            whole rows gets it (`AgentSpec.whole_rows`). With None, that agent gets `private` and `input` together.
    """

    id: str
    input: Mapping[str, Any]
    private: Mapping[str, Any] = attrs.field(factory=dict, repr=False)
    row: Any = attrs.field(default=None, repr=False)

    def given(self, *, whole: bool) -> Any:
        """Return what an agent gets: `input`, or the whole row, with its gold."""
        if not whole:
            return self.input
        return {**self.private, **self.input} if self.row is None else self.row


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
        ...

    def load(self, split: str) -> Sequence[Task]:
        """Return the split's tasks in a stable order.

        Raises:
            agentrig.errors.AgentrigError: The data is missing; the message names the command that creates it.
        """
        ...


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


def overlap(one: Sequence[Task], other: Sequence[Task]) -> int:
    """Return how many tasks of `other` have an input that also occurs in `one`."""

    def key(task: Task) -> str:
        return fingerprint([Task(id="", input=task.input)])

    known = {key(task) for task in one}
    return sum(key(task) in known for task in other)
