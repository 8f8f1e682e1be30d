"""Tasks: the rows of data that agents are run on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs


@attrs.frozen(kw_only=True)
class Task:
    """One row of data, split into what the agent may see and what only the reward may see.

    Attributes:
        id: Unique and stable within its task set, over processes and runs.
        input: JSON values only. All that an agent ever gets.
        private: JSON values only (gold SQL, answers). Never leaves the reward's side.
    """

    id: str
    input: Mapping[str, Any]
    private: Mapping[str, Any] = attrs.field(factory=dict, repr=False)


class Tasks(Protocol):
    """A set of tasks with named splits; what `TasksSpec.build` returns.

    Attributes:
        splits: The names that `load` knows.
        roles: Which split serves which role: `train` (learned from), `validation` (watched while
            training, settings are chosen on it) and `report` (held out; the accuracy of
            `summary.json`). A run's own `[run]` keys `train`, `validation`, `report` override it.
    """

    splits: Sequence[str]

    @property
    def roles(self) -> Mapping[str, str]:
        """Role to split; an attribute will do."""
        ...

    def load(self, split: str) -> Sequence[Task]:
        """Return the split's tasks in a stable order.

        Raises:
            agentrig.errors.AgentrigError: The data is missing; the message names the command that makes it.
        """
        ...


def fingerprint(tasks: Sequence[Task]) -> str:
    """Return the SHA-256 (hex) of the tasks' ids, inputs and private parts, paths left out.

    Absolute paths differ between machines and say nothing of the data, so a string value that
    starts with `/` counts by its last component only.
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
    """Return how many tasks of `other` have an input that is in `one` too."""

    def key(task: Task) -> str:
        return fingerprint([Task(id="", input=task.input)])

    known = {key(task) for task in one}
    return sum(key(task) in known for task in other)
