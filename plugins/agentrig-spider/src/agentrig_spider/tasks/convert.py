"""Converts a Spider download to the Parquet layout of `spider`, or checks files in that layout."""

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
"""Split to its official files; train_others.json is left out, as in the reference's 7000 rows."""

SAMPLES: Mapping[str, tuple[int, int]] = {"test_dev_500": (500, 0), "test_dev": (100, 42)}
"""Sample of `test` to its number of rows and its seed.

Sampled with `numpy.random.RandomState(seed).choice(rows_of_test, n, replace=False)`, in that order; with Spider's
official test.json these are the rows of the published bundle.
"""

KINDS = (
    ("official", ("dev.json", "test.json"), "an official download"),
    ("parquet", tuple(FILES.values()), "the Parquet layout"),
)


def convert(source: str, target: str | None = None) -> str:
    """Convert an official download, or copy or check converted files.

    Args:
        source: A folder or a zip file of an official download or of the Parquet layout; the files may be in a folder
            inside it.
        target: Where to write; by default `spider-parquet` beside the source. Without a target, a folder that is
            already in the Parquet layout is only checked.

    Returns:
        Lines of text: the splits, and their roles.
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
    """Check files in the Parquet layout; return a line per split, and which role each split has in a run."""
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
    lines.append("a run trains on {train}, validates on {validation}, reports on {report}".format(**roles))
    return "\n".join(lines)


def _find(folder: Path) -> tuple[str, Path]:
    """Return the kind of files in a folder, and where they are: an archive may have them in an inner folder."""
    candidates = [folder, *sorted(p for p in folder.rglob("*") if p.is_dir() and "__MACOSX" not in p.parts)]
    # Converted files may be in the same folder as the official ones.
    for kind, names, _ in reversed(KINDS):
        for candidate in candidates:
            if (candidate / "database").is_dir() and any((candidate / name).is_file() for name in names):
                return kind, candidate
    raise AgentrigError(
        f"{folder} is not an official Spider download and not in the Parquet layout: no folder has database/ and"
        f" one of {', '.join(name for _, names, _ in KINDS for name in names)}"
    )


def _write(kind: str, root: Path, home: Path) -> str:
    """Write the Parquet layout to `home`, completely or not at all."""
    if home.exists() and (not home.is_dir() or any(home.iterdir())):
        raise AgentrigError(f"{home} already exists and is not empty; name another folder with --to")
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
            database.chmod(0o444)  # no agent's query may change the databases that the reward uses
        with _named(made, root):
            found = check(made)
        if home.is_dir():
            home.rmdir()
        made.rename(home)
    return "\n".join([str(home), found, *notes])


def _write_samples(folder: Path) -> list[str]:
    """Write the missing samples of `test`; return messages about those that can't be made."""
    import numpy

    test = folder / FILES["test"]
    absent = [split for split in SAMPLES if not (folder / FILES[split]).is_file()]
    if not test.is_file():
        return [f"{' and '.join(absent)}: not made, because there is no test split to sample from"] if absent else []
    rows, notes = read_rows(test), []
    for split in absent:
        n, seed = SAMPLES[split]
        if len(rows) < n:
            notes.append(f"{split}: not made, because test has only {len(rows)} rows")
            continue
        places = numpy.random.RandomState(seed).choice(len(rows), n, replace=False)
        _write_rows(folder / FILES[split], [rows[place] for place in places])
    return notes


def _official_rows(file: Path) -> list[Mapping[str, Any]]:
    try:
        rows = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise AgentrigError(f"{file} is damaged; it is not JSON: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(r, dict) and all(c in r for c in COLUMNS) for r in rows):
        raise AgentrigError(f"{file} is not an official Spider file: it needs a list of rows with {', '.join(COLUMNS)}")
    return rows


def _write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({column: [row[column] for row in rows] for column in COLUMNS}), path)


@contextmanager
def _folder_beside(home: Path) -> Iterator[Path]:
    """Yield an empty folder on the same disk as `home`; it is removed at the end."""
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{home.name}-", dir=home.parent) as name:
        folder = Path(name) / home.name
        folder.mkdir()
        yield folder


@contextmanager
def _named(place: Path, given: Path) -> Iterator[None]:
    """Make errors name the user's path instead of the temporary folder."""
    try:
        yield
    except AgentrigError as error:
        raise AgentrigError(str(error).replace(str(place), str(given))) from error
