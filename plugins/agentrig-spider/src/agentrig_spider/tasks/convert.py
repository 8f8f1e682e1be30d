"""From a Spider download to the Parquet layout of `spider`, or a check of files in that layout."""

from __future__ import annotations

import json
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrig.errors import AgentrigError
from agentrig_spider.tasks.spider import COLUMNS, FILES, Spider, SpiderConfig, database_of, read_rows

OFFICIAL: Mapping[str, Sequence[str]] = {
    "train": ("train_spider.json",),
    "dev": ("dev.json",),
    "test": ("test.json",),
}
"""Split to the official files that it is made of; the reference's 7000 rows leave train_others.json out."""

SAMPLES: Mapping[str, tuple[int, int]] = {"test_dev_500": (500, 0), "test_dev": (100, 42)}
"""Sample of `test` to its number of rows and its seed.

Drawn as `numpy.random.RandomState(seed).choice(rows_of_test, n, replace=False)`, in that order; from Spider's official
test.json these are the rows of the published bundle.
"""

KINDS = (
    ("official", ("dev.json", "test.json"), "an official download"),
    ("parquet", tuple(FILES.values()), "the Parquet layout"),
)


def convert(source: str, target: str | None = None) -> str:
    """Convert an official download, or copy or check converted files.

    Args:
        source: A folder or a zip file of an official download or of the Parquet layout; the files may lie in a folder
            inside it.
        target: Where to write; beside the source as `spider-parquet` by default. A folder that is in the Parquet layout
            already is only checked where no target is named.

    Returns:
        What was found, in lines.

    Raises:
        AgentrigError: Neither of them, or something in it is missing or damaged. The message names what was given.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        kind, root = _find(path)
        if kind == "parquet" and target is None:
            return check(root)
        home = Path(target).expanduser() if target else path.resolve().with_name("spider-parquet")
        return _write(kind, root, home)
    if not (path.is_file() and zipfile.is_zipfile(path)):
        cut_off = "; was its download cut off?" if path.is_file() else ""
        raise AgentrigError(f"{path} is neither a folder nor a zip file{cut_off}")
    home = Path(target).expanduser() if target else path.with_name("spider-parquet")
    with _folder_beside(home) as unpacked, _named(unpacked, path):
        try:
            with zipfile.ZipFile(path) as archive:
                archive.extractall(unpacked)
        except (zipfile.BadZipFile, RuntimeError, NotImplementedError, OSError, EOFError) as error:
            raise AgentrigError(f"{path} can't be unpacked: {error}") from error
        return _write(*_find(unpacked), home)


def check(folder: Path) -> str:
    """Check files in the Parquet layout; returns a line a split, and which split a run uses for what.

    Raises:
        AgentrigError: A file is damaged or a database is missing.
    """
    lines = []
    seen: dict[tuple[str, str], str] = {}
    for split, file in FILES.items():
        if not (folder / file).is_file():
            lines.append(f"{split}: not there")
            continue
        rows = read_rows(folder / file)
        missing = sorted({r["db_id"] for r in rows if not database_of(folder, split, r["db_id"]).is_file()})
        if missing:
            some = f"{', '.join(missing[:5])}{' …' if len(missing) > 5 else ''}"
            raise AgentrigError(f"{folder} lacks databases of {split}: {some}")
        keys = [(r["db_id"], r["question"]) for r in rows]
        shared = sum(seen.get(key, split) != split for key in keys)
        note = f", {shared} of them in an earlier split too" if shared else ""
        if split in SAMPLES and shared == len(rows) and {seen[key] for key in keys} == {"test"}:
            note = ", a sample of test"
        for key in keys:
            seen.setdefault(key, split)
        lines.append(f"{split}: {len(rows)} tasks on {len({r['db_id'] for r in rows})} databases{note}")
    roles = Spider(SpiderConfig(dir=str(folder))).roles
    lines.append("a run learns from {train}, validates on {validation}, reports on {report}".format(**roles))
    return "\n".join(lines)


def _find(folder: Path) -> tuple[str, Path]:
    """Return which kind of files a folder holds and where in it, for an archive wraps them in a folder of its own."""
    candidates = [folder, *sorted(p for p in folder.rglob("*") if p.is_dir() and "__MACOSX" not in p.parts)]
    # Converted files may lie beside the official ones that they were made from.
    for kind, names, _ in reversed(KINDS):
        for candidate in candidates:
            if (candidate / "database").is_dir() and any((candidate / name).is_file() for name in names):
                return kind, candidate
    raise AgentrigError(
        f"{folder} is no official Spider download and not in the Parquet layout: no folder in it has database/ and one"
        f" of {', '.join(name for _, names, _ in KINDS for name in names)}"
    )


def _write(kind: str, root: Path, home: Path) -> str:
    """Write the Parquet layout at `home`, all of it or nothing."""
    if home.exists() and (not home.is_dir() or any(home.iterdir())):
        raise AgentrigError(f"{home} is there already and not empty; name another by --to")
    with _folder_beside(home) as made:
        if kind == "official":
            for split, files in OFFICIAL.items():
                present = [root / f for f in files if (root / f).is_file()]
                if present:
                    _write_rows(made / FILES[split], [row for file in present for row in _official_rows(file)])
        else:
            for file in FILES.values():
                if (root / file).is_file():
                    shutil.copyfile(root / file, made / file)
        for name in ("database", "test_database"):
            if (root / name).is_dir():
                shutil.copytree(root / name, made / name, copy_function=shutil.copyfile)
        for name in ("tables.json", "test_tables.json"):
            if (root / name).is_file():
                shutil.copyfile(root / name, made / name)
        notes = _write_samples(made)
        for database in made.glob("*database/*/*.sqlite*"):
            database.chmod(0o444)  # no agent's query is to change what the reward judges by
        with _named(made, root):
            found = check(made)
        if home.is_dir():
            home.rmdir()
        made.rename(home)
    return "\n".join([str(home), found, *notes])


def _write_samples(folder: Path) -> list[str]:
    """Write the samples of `test` that are not there; returns in words which could not be made."""
    import numpy

    test = folder / FILES["test"]
    absent = [split for split in SAMPLES if not (folder / FILES[split]).is_file()]
    if not test.is_file():
        return [f"{' and '.join(absent)}: not made, for there is no test split to draw them from"] if absent else []
    rows, notes = read_rows(test), []
    for split in absent:
        n, seed = SAMPLES[split]
        if len(rows) < n:
            notes.append(f"{split}: not made, for test has {len(rows)} rows only")
            continue
        places = numpy.random.RandomState(seed).choice(len(rows), n, replace=False)
        _write_rows(folder / FILES[split], [rows[place] for place in places])
    return notes


def _official_rows(file: Path) -> list[Mapping[str, Any]]:
    try:
        rows = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise AgentrigError(f"{file} is damaged, for it is no JSON: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(r, dict) and all(c in r for c in COLUMNS) for r in rows):
        raise AgentrigError(f"{file} is no official Spider file: it must be a list of rows with {', '.join(COLUMNS)}")
    return rows


def _write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({column: [row[column] for row in rows] for column in COLUMNS}), path)


@contextmanager
def _folder_beside(home: Path) -> Iterator[Path]:
    """Yield an empty folder on the same disk as `home`; what is left of it goes at the end."""
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{home.name}-", dir=home.parent) as name:
        folder = Path(name) / home.name
        folder.mkdir()
        yield folder


@contextmanager
def _named(place: Path, given: Path) -> Iterator[None]:
    """Make errors speak of what the user gave instead of the folder that it was put in."""
    try:
        yield
    except AgentrigError as error:
        raise AgentrigError(str(error).replace(str(place), str(given))) from error
