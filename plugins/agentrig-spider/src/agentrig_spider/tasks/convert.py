"""From an official Spider download to the Parquet layout of `spider`, or a check of files in that layout."""

from __future__ import annotations

import json
import shutil
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrig.errors import AgentrigError
from agentrig_spider.tasks.spider import COLUMNS, FILES, database_folder, database_of, read_rows

OFFICIAL: Mapping[str, Sequence[str]] = {
    "train": ("train_spider.json",),
    "dev": ("dev.json",),
    "test": ("test.json",),
}
"""Split to the official files that it is made of; the reference's 7000 rows leave train_others.json out."""


def convert(source: str, target: str | None = None) -> str:
    """Convert an official download, or check converted files.

    Args:
        source: A folder or a zip file; the official files may lie in a folder inside it.
        target: Where to write; beside the source as `spider-parquet` by default. Not needed for a check.

    Returns:
        What was found, in lines.

    Raises:
        AgentrigError: Neither an official download nor converted files, or something in it is missing.
    """
    path = Path(source).expanduser()
    if path.is_file() and zipfile.is_zipfile(path):
        with tempfile.TemporaryDirectory() as unpacked:
            with zipfile.ZipFile(path) as archive:
                archive.extractall(unpacked)
            return _convert_folder(Path(unpacked), Path(target) if target else path.with_name("spider-parquet"))
    if not path.is_dir():
        raise AgentrigError(f"{path} is neither a folder nor a zip file")
    if (path / FILES["dev"]).is_file() or (path / FILES["train"]).is_file():
        return check(path)
    return _convert_folder(path, Path(target) if target else path.resolve().with_name("spider-parquet"))


def check(folder: Path) -> str:
    """Check files in the Parquet layout; returns a line a split.

    Raises:
        AgentrigError: A database is missing, or splits share questions.
    """
    lines = []
    seen: dict[tuple[str, str], str] = {}
    for split, file in FILES.items():
        if not (folder / file).is_file():
            lines.append(f"{split}: not there")
            continue
        rows = read_rows(folder / file)
        databases = folder / database_folder(split)
        missing = sorted({r["db_id"] for r in rows if not database_of(databases, r["db_id"]).is_file()})
        if missing:
            raise AgentrigError(f"{databases} lacks {', '.join(missing[:5])}{' …' if len(missing) > 5 else ''}")
        note = ""
        if split in ("train", "dev", "test"):
            keys = [(r["db_id"], r["question"]) for r in rows]
            shared = sum(seen.get(key, split) != split for key in keys)
            seen.update(dict.fromkeys(keys, split))
            note = f", {shared} of them in an earlier split too" if shared else ""
        lines.append(f"{split}: {len(rows)} tasks on {len({r['db_id'] for r in rows})} databases{note}")
    return "\n".join(lines)


def _convert_folder(folder: Path, target: Path) -> str:
    root = _official_root(folder)
    if target.exists() and any(target.iterdir()):
        raise AgentrigError(f"{target} is there already and not empty; name another by --to")
    target.mkdir(parents=True, exist_ok=True)
    for split, files in OFFICIAL.items():
        present = [root / f for f in files if (root / f).is_file()]
        if present:
            _write(target / FILES[split], [row for file in present for row in json.loads(file.read_text("utf-8"))])
    for name in ("database", "test_database"):
        if (root / name).is_dir():
            shutil.copytree(root / name, target / name)
    for name in ("tables.json", "test_tables.json"):
        if (root / name).is_file():
            shutil.copy(root / name, target / name)
    return f"{target}\n{check(target)}"


def _official_root(folder: Path) -> Path:
    """Return the folder that holds the official files, which an archive wraps in one of its own."""
    candidates = [folder, *sorted(p for p in folder.rglob("*") if p.is_dir() and "__MACOSX" not in p.parts)]
    for candidate in candidates:
        if (candidate / "dev.json").is_file() and (candidate / "database").is_dir():
            return candidate
    raise AgentrigError(
        f"{folder} is no official Spider download: no folder in it has both dev.json and database/. Nor is it "
        f"in the Parquet layout: it has no {FILES['dev']}"
    )


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({column: [row[column] for row in rows] for column in COLUMNS}), path)
