"""Rows of data as tasks, in one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrig.errors import ConfigError
from agentrig.plugins.specs import TasksSpec
from agentrig.rows import read_rows, splits_of
from agentrig.tasks import ROLES, Task, check_same_kinds, tasks_of_rows

NAMES: Mapping[str, Sequence[str]] = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "test"),
    "report": ("test", "report", "validation", "valid", "val", "dev"),
}
"""Role to the names of splits in a folder of several: the first one that exists is used."""


def tasks(
    source: Any,
    *,
    name: str,
    summary: str = "",
    validation: Any = None,
    report: Any = None,
    gold: Sequence[str] | None = None,
    text: Sequence[str] = (),
) -> TasksSpec:
    """Return the spec of a task set made of rows, as Agent Lightning's datasets are.

    The columns of `gold` are hidden: an agent gets the others, and the reward gets both. An agent that computes its own
    reward asks for whole rows, `whole_rows=True` in `lightning.agent` or `AgentSpec`: it gets the rows as they are, and
    the run's manifest and report say that it sees its gold.

    Args:
        source: The rows to train on: a list of rows, a data frame or a dataset; or a path to a Parquet, JSON Lines,
            JSON, CSV or Arrow file, or to a folder that Hugging Face `datasets` saved. A folder of several splits gives
            all roles. A row is a mapping of columns; anything else, for example a text, becomes the column `input`.
        name: The component's name.
        summary: One line about it; empty: made from the source.
        validation: The rows to validate on, in the same forms.
        report: The rows to report on.
        gold: The gold columns. With None they are not known: only an agent that asks for whole rows can use the tasks.
        text: The columns of CSV files that hold text even where a cell looks like a number, for example codes.

    Raises:
        ConfigError: `gold` or `text` is one text, which would count as its letters.

    Example:
        ```python
        yield lightning.tasks("train.parquet", validation="test.parquet", gold=["result"], name="calc-x")
        ```
    """
    for what, columns in (("gold", gold), ("text", text)):
        if isinstance(columns, str):
            raise ConfigError(f'lightning.tasks: write {what}=["{columns}"], a list of strings')
    sources = {"train": source, "validation": validation, "report": report}
    given = {role: rows for role, rows in sources.items() if rows is not None}

    def build(config: Any) -> RowTasks:
        return RowTasks(given, gold, text)

    told = source if isinstance(source, str | Path) else f"a {type(source).__name__}"
    return TasksSpec(name=name, summary=summary or f"Rows of {told}.", build=build)


class RowTasks:
    """Implements `agentrig.tasks.Tasks` on rows.

    Attributes:
        whole_rows: Whether the gold columns are not known, so that only an agent that may see them can be used.
    """

    def __init__(self, given: Mapping[str, Any], gold: Sequence[str] | None, text: Sequence[str]) -> None:
        self._gold, self._text = tuple(gold or ()), tuple(text)
        self._loaded: dict[str, Sequence[Task]] = {}
        self.whole_rows = gold is None
        self.roles: Mapping[str, str] = {role: role for role in given}
        self._sources: Mapping[str, Any] = given
        folder = splits_of(given["train"])
        if folder:
            base = Path(given["train"])
            more = {role: rows for role, rows in given.items() if role != "train"}
            self._sources = {**{split: base / split for split in folder}, **more}
            self.roles = {role: split for role in ROLES if (split := _named(role, folder, given))}
        self.splits: Sequence[str] = tuple(self._sources)

    def load(self, split: str) -> Sequence[Task]:
        """Return the rows of a split, in their order."""
        rows, place = read_rows(self._sources[split], text=self._text)
        tasks = tasks_of_rows(rows, place, split=split, gold=self._gold)
        check_same_kinds({**self._loaded, split: tasks})
        self._loaded[split] = tasks
        return tasks


def _named(role: str, folder: Sequence[str], given: Mapping[str, Any]) -> str:
    """Return the split of a role in a folder of several; '' for none."""
    if role != "train" and role in given:
        return role
    return next((split for split in NAMES[role] if split in folder), "")
