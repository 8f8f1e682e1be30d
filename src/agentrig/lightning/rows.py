"""Rows of data from what a user has: a list, a data frame, a file, or a folder of Hugging Face `datasets`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrig.errors import AgentrigError

KINDS = "Parquet, JSON Lines, JSON, CSV or Arrow files, or a folder that Hugging Face datasets saved"
SPLITS = "dataset_dict.json"
"""The file in a folder of several splits, each in a folder of its own."""


def read_rows(source: Any) -> list[Any]:
    """Return the rows of a source.

    Args:
        source: A path, from the current folder; a list; a `datasets.Dataset`; a data frame; or any other iterable.

    Raises:
        AgentrigError: The file does not exist, can't be read, or is of another kind; the message names it.
    """
    if isinstance(source, str | Path):
        return _of_path(Path(source).expanduser())
    records = getattr(source, "to_dict", None)
    if records is not None and hasattr(source, "columns"):  # a data frame of pandas
        return [_plain(row) for row in records(orient="records")]
    if isinstance(source, Iterable) and not isinstance(source, Mapping):
        return [_plain(row) for row in source]
    raise AgentrigError(f"lightning.tasks takes a list of rows, or a path to {KINDS}; this is {source!r:.100}")


def splits_of(source: Any) -> Sequence[str]:
    """Return the splits of a folder that has several; empty for every other source."""
    if not isinstance(source, str | Path):
        return ()
    file = Path(source).expanduser() / SPLITS
    return tuple(json.loads(file.read_text())["splits"]) if file.is_file() else ()


def _of_path(path: Path) -> list[Any]:
    if not path.exists():
        raise AgentrigError(f"there is no {path.absolute()}; a path of lightning.tasks starts in the current folder")
    read = _folder if path.is_dir() else READERS.get(path.suffix.lower())
    if read is None:
        raise AgentrigError(f"{path} has an unknown ending; lightning.tasks reads {KINDS}")
    try:
        return read(path)
    except AgentrigError:
        raise
    except (OSError, ValueError, KeyError) as error:  # pyarrow's own errors are of these kinds
        raise AgentrigError(f"{path} can't be read: {error}") from error


def _parquet(path: Path) -> list[Any]:
    import pyarrow.parquet as pq

    rows: list[Any] = pq.read_table(path).to_pylist()
    return rows


def _csv(path: Path) -> list[Any]:
    from pyarrow import csv

    rows: list[Any] = csv.read_csv(path).to_pylist()
    return rows


def _lines(path: Path) -> list[Any]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise AgentrigError(f"{path}, line {number} is no JSON: {error.msg} at column {error.colno}") from None
    return rows


def _json(path: Path) -> list[Any]:
    rows = json.loads(path.read_text(encoding="utf-8-sig"))
    if not isinstance(rows, list):
        raise AgentrigError(f"{path} holds a {type(rows).__name__}; write a list of rows")
    return rows


def _arrow(path: Path) -> list[Any]:
    """Read Arrow's stream format, which Hugging Face `datasets` writes, or its file format."""
    import pyarrow as pa

    with pa.memory_map(str(path)) as data:
        try:
            rows: list[Any] = pa.ipc.open_stream(data).read_all().to_pylist()
        except pa.ArrowInvalid:
            data.seek(0)
            rows = pa.ipc.open_file(data).read_all().to_pylist()
    return rows


def _folder(path: Path) -> list[Any]:
    """Read what `Dataset.save_to_disk` wrote: its state names the files in their order."""
    state = path / "state.json"
    if (path / SPLITS).is_file():
        raise AgentrigError(f"{path} has the splits {', '.join(splits_of(path))}; name one: {path}/SPLIT")
    if not state.is_file():
        raise AgentrigError(f"{path} is no folder that Dataset.save_to_disk wrote: it has no state.json")
    return [row for part in json.loads(state.read_text())["_data_files"] for row in _arrow(path / part["filename"])]


READERS: Mapping[str, Callable[[Path], list[Any]]] = {
    ".parquet": _parquet,
    ".csv": _csv,
    ".jsonl": _lines,
    ".ndjson": _lines,
    ".json": _json,
    ".arrow": _arrow,
}
"""The reader of each ending."""


def _plain(value: Any) -> Any:
    """Return NumPy's values as Python's; everything else as it is."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    convert = getattr(value, "tolist", None)
    return convert() if convert is not None else value
