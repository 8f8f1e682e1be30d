"""The tasks `spider`: Spider 1.0 (Yu et al. 2018, arXiv:1809.08887) from its Parquet layout.

A folder holds `train_spider.parquet`, `dev.parquet`, perhaps `test.parquet`, `test_dev_500.parquet` and
`test_dev.parquet` (columns `db_id`, `question`, `query`), databases as `database/DB/DB.sqlite`, those of the test
splits as `test_database/DB/DB.sqlite`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from agentrig import Task, setting
from agentrig.errors import AgentrigError

VARIABLES = ("AGENTRIG_SPIDER_DIR", "VERL_SPIDER_DATA_DIR")

FILES: Mapping[str, str] = {
    "train": "train_spider.parquet",
    "dev": "dev.parquet",
    "test": "test.parquet",
    "test_dev_500": "test_dev_500.parquet",
    "test_dev": "test_dev.parquet",
}
"""Split to file."""

COLUMNS = ("db_id", "question", "query")
CURE = "make it from an official download with: agentrig data spider --from DIR_OR_ZIP --to FOLDER"


@attrs.frozen(kw_only=True)
class SpiderConfig:
    """Settings of `spider`."""

    dir: str = setting("", help="Spider's folder; empty for AGENTRIG_SPIDER_DIR or VERL_SPIDER_DATA_DIR")


class Spider:
    """Implements `agentrig.tasks.Tasks`. Train, dev and test are apart; `held_out` are for final figures only."""

    splits: Sequence[str] = tuple(FILES)
    roles: Mapping[str, str] = MappingProxyType({"train": "train", "validation": "dev", "report": "dev"})
    held_out: Sequence[str] = ("test", "test_dev_500", "test_dev")

    def __init__(self, config: SpiderConfig) -> None:
        self._config = config

    def load(self, split: str) -> Sequence[Task]:
        """Return a split's tasks in the order of the file.

        Raises:
            AgentrigError: Folder, file or a database is missing; says how to make it.
        """
        folder = find_folder(self._config.dir)
        rows = read_rows(folder / FILES[split])
        databases = folder / database_folder(split)
        missing = sorted({r["db_id"] for r in rows if not database_of(databases, r["db_id"]).is_file()})
        if missing:
            raise AgentrigError(
                f"{databases} lacks {len(missing)} databases of split {split}, the first is {missing[0]}; {CURE}"
            )
        return [
            Task(
                id=f"{split}-{i:05d}",
                input={
                    "question": row["question"],
                    "db_id": row["db_id"],
                    "database": str(database_of(databases, row["db_id"])),
                },
                private={"gold": row["query"]},
            )
            for i, row in enumerate(rows)
        ]


def find_folder(configured: str) -> Path:
    """Return Spider's folder.

    Raises:
        AgentrigError: None is named, or it is not there.
    """
    names = [("tasks.dir", configured), *((v, os.environ.get(v, "")) for v in VARIABLES)]
    source, value = next(((s, v) for s, v in names if v), ("", ""))
    if not value:
        raise AgentrigError(
            f"Spider's folder is not named: set {VARIABLES[0]} (or {VARIABLES[1]}), or tasks.dir=FOLDER; {CURE}"
        )
    folder = Path(value).expanduser().resolve()
    if not folder.is_dir():
        raise AgentrigError(f"{source} names {folder}, which is no folder; {CURE}")
    return folder


def database_folder(split: str) -> str:
    """Return the folder of a split's databases, relative to Spider's."""
    return "test_database" if split.startswith("test") else "database"


def database_of(databases: Path, name: str) -> Path:
    """Return the file of a database."""
    return databases / name / f"{name}.sqlite"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a split.

    Raises:
        AgentrigError: The file is not there, or has other columns.
    """
    import pyarrow.parquet as pq

    if not path.is_file():
        there = sorted(p.name for p in path.parent.glob("*.parquet"))
        raise AgentrigError(f"{path} is not there (Parquet files there: {', '.join(there) or 'none'}); {CURE}")
    table = pq.read_table(path)
    absent = [c for c in COLUMNS if c not in table.column_names]
    if absent:
        raise AgentrigError(
            f"{path} has no column {', '.join(absent)}; its columns are {', '.join(table.column_names)}"
        )
    rows: list[dict[str, Any]] = table.select(list(COLUMNS)).to_pylist()
    return rows
