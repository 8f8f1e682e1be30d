"""The tasks `spider`: Spider 1.0 (Yu et al. 2018, arXiv:1809.08887) from its Parquet layout.

A folder holds some of `train_spider.parquet`, `dev.parquet`, `test.parquet`, `test_dev_500.parquet` and
`test_dev.parquet` (columns `db_id`, `question`, `query`; others are ignored), databases as `database/DB/DB.sqlite`,
those of the test splits as `test_database/DB/DB.sqlite` or there too.
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
from agentrig_spider.difficulty import difficulty

VARIABLES = ("AGENTRIG_SPIDER_DIR", "VERL_SPIDER_DATA_DIR")

FILES: Mapping[str, str] = {
    "train": "train_spider.parquet",
    "dev": "dev.parquet",
    "test": "test.parquet",
    "test_dev_500": "test_dev_500.parquet",
    "test_dev": "test_dev.parquet",
}
"""Split to file."""

CHOICES: Mapping[str, Sequence[str]] = {
    "train": ("train",),
    "validation": ("dev", "test_dev_500", "test_dev", "test"),
    "report": ("test_dev_500", "test", "test_dev", "dev"),
}
"""Role to splits: the first one that exists is used; the report uses another one than validation if possible."""

COLUMNS = ("db_id", "question", "query")
CURE = "create it from an official download with: agentrig data spider --from DIR_OR_ZIP --to FOLDER"


@attrs.frozen(kw_only=True)
class SpiderConfig:
    """Settings of `spider`."""

    dir: str = setting("", help="Spider's folder; empty for AGENTRIG_SPIDER_DIR or VERL_SPIDER_DATA_DIR")


class Spider:
    """Implements `agentrig.tasks.Tasks`. Train, dev and test are disjoint; use `held_out` for final results only."""

    splits: Sequence[str] = tuple(FILES)
    held_out: Sequence[str] = ("test", "test_dev_500", "test_dev")

    def __init__(self, config: SpiderConfig) -> None:
        self._config = config

    @property
    def roles(self) -> Mapping[str, str]:
        """The split of each role, by the files that exist: see `CHOICES`."""
        try:
            there = splits_in(find_folder(self._config.dir))
        except AgentrigError:
            there = tuple(FILES)  # `load` says what is wrong with the folder
        chosen: dict[str, str] = {}
        for role, choices in CHOICES.items():
            fit = [split for split in choices if split in there] or choices[:1]
            other = [split for split in fit if split not in chosen.values()]
            chosen[role] = (other or fit)[0]
        return MappingProxyType(chosen)

    def load(self, split: str) -> Sequence[Task]:
        """Return a split's tasks in the order of the file."""
        folder = find_folder(self._config.dir)
        if not (folder / FILES[split]).is_file():
            raise AgentrigError(
                f"{folder} has no split {split}: {FILES[split]} is not there. It has "
                f"{', '.join(splits_in(folder)) or 'none'}: choose by run.train, run.validation and run.report, "
                f"or {CURE}"
            )
        rows = read_rows(folder / FILES[split])
        missing = sorted({r["db_id"] for r in rows if not database_of(folder, split, r["db_id"]).is_file()})
        if missing:
            databases = " and ".join(f"{name}/" for name in database_folders(split))
            raise AgentrigError(
                f"{folder}: {databases} lacks {len(missing)} databases of split {split}, the first is {missing[0]};"
                f" {CURE}"
            )
        return [
            Task(
                id=f"{split}-{i:05d}",
                input={
                    "question": row["question"],
                    "db_id": row["db_id"],
                    "database": str(database_of(folder, split, row["db_id"])),
                },
                private={"gold": row["query"]},
                row=row,
                slices={"difficulty": difficulty(row["query"]), "database": row["db_id"]},
                root=str(folder),
            )
            for i, row in enumerate(rows)
        ]


def find_folder(configured: str) -> Path:
    """Return Spider's folder."""
    names = [("tasks.dir", configured), *((v, os.environ.get(v, "")) for v in VARIABLES)]
    source, value = next(((s, v) for s, v in names if v), ("", ""))
    if not value:
        raise AgentrigError(
            f"Spider's folder is not set: set {VARIABLES[0]} (or {VARIABLES[1]}), or tasks.dir=FOLDER; {CURE}"
        )
    folder = Path(value).expanduser().resolve()
    if not folder.is_dir():
        raise AgentrigError(f"{source} names {folder}, which is not a folder; {CURE}")
    return folder


def splits_in(folder: Path) -> Sequence[str]:
    """Return the splits whose files are in a folder."""
    return tuple(split for split, file in FILES.items() if (folder / file).is_file())


def database_folders(split: str) -> Sequence[str]:
    """Return the folders that may have a split's databases, relative to Spider's folder, in order of preference."""
    return ("test_database", "database") if split.startswith("test") else ("database",)


def database_of(folder: Path, split: str, name: str) -> Path:
    """Return the file of a split's database; if it does not exist, its path in the preferred folder."""
    places = [folder / databases / name / f"{name}.sqlite" for databases in database_folders(split)]
    return next((place for place in places if place.is_file()), places[0])


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a split."""
    import pyarrow.parquet as pq

    if not path.is_file():
        there = sorted(p.name for p in path.parent.glob("*.parquet"))
        raise AgentrigError(f"{path} is not there (Parquet files there: {', '.join(there) or 'none'}); {CURE}")
    try:
        table = pq.read_table(path)
    except (OSError, ValueError) as error:  # pyarrow's own errors are of these kinds
        raise AgentrigError(f"{path} is damaged; it can't be read as Parquet: {error}; {CURE}") from error
    absent = [c for c in COLUMNS if c not in table.column_names]
    if absent:
        raise AgentrigError(
            f"{path} has no column {', '.join(absent)}; its columns are {', '.join(table.column_names)}"
        )
    rows: list[dict[str, Any]] = table.select(list(COLUMNS)).to_pylist()
    for number, row in enumerate(rows):
        for column in COLUMNS:
            if not row[column]:
                raise AgentrigError(f"{path}, row {number} (the first is 0), column {column} is empty; {CURE}")
    return rows
