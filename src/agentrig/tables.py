"""The task set `table`: the rows of a file, with columns named by what they are for."""

from __future__ import annotations

import attrs

from agentrig.errors import ConfigError
from agentrig.rows import read_rows
from agentrig.settings import setting
from agentrig.tasks import SPLITS, Columns, Table


@attrs.frozen(kw_only=True)
class TableConfig:
    """Settings of `table`."""

    file: str = setting("", help="CSV, Parquet, JSON Lines, JSON or Arrow file of the rows; from the current folder")
    validation: str = setting("", help="a file of the validation rows; file then has those to train on")
    test: str = setting("", help="a file of the held-out rows")
    input: list[str] = setting(list, help="columns that the agent gets; empty: all that are not named otherwise")
    private: list[str] = setting(list, help="columns that only the reward gets, such as the right answer")
    id: str = setting("", help="column of the rows' ids; empty: `id` if there is one, else row numbers")
    split: str = setting("", help="column that says train, validation or test; empty: by files or shares")
    shares: list[float] = setting(
        lambda: [0.8, 0.1, 0.1], help="shares of train, validation and test, of one file without a column of splits"
    )
    text: list[str] = setting(list, help="columns of a CSV file that hold text even where it looks like a number")
    slices: list[str] = setting(list, help="columns by which accuracy is broken down")


def table(config: TableConfig) -> Table:
    """Return the task set.

    Raises:
        ConfigError: No file is named, or see `Table`.
        AgentrigError: A file can't be read; the message names line and column.
    """
    if not config.file:
        raise ConfigError("[tasks] table needs a file of rows: tasks.file=ROWS.csv")
    files = dict(zip(SPLITS.values(), (config.file, config.validation, config.test), strict=True))
    columns = Columns(
        input=config.input, private=config.private, id=config.id, split=config.split, slices=config.slices
    )
    tables = {split: read_rows(file, text=config.text) for split, file in files.items() if file}
    return Table(tables, columns, config.shares)
