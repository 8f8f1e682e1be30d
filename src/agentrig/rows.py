"""Rows of data from what a user has: a list, a data frame, a file, or a folder of Hugging Face `datasets`."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from agentrig.errors import AgentrigError, nearest, nearest_path
from agentrig.text import DEEP_WORDS, LARGE_WORDS, check_regular, json_kind

KINDS = "Parquet, JSON Lines, JSON, CSV or Arrow files, or a folder that Hugging Face datasets saved"
NOT_UTF8 = "the byte {:#04x} is not UTF-8; {}"
AS_UTF8 = "if it is text, save it as UTF-8: iconv -f ENCODING -t utf-8 OLD > NEW (its encoding: latin1, gbk, …)"

STARTS: Mapping[bytes, str] = {
    b"\xff\xfe": "is UTF-16 text; save it as UTF-8: iconv -f utf-16 -t utf-8 OLD > NEW",
    b"\xfe\xff": "is UTF-16 text; save it as UTF-8: iconv -f utf-16 -t utf-8 OLD > NEW",
    b"\x1f\x8b": "is compressed (gzip); unpack it: gunzip < OLD > NEW",
}
"""The first two bytes of a file that is no UTF-8 text, and what is said of it."""

LFS = b"version https://git-lfs.github.com/spec/"
"""How a pointer of Git LFS starts: what it stands for has not been downloaded."""

QUOTED = re.compile(r'(?<![^,\n])"(?:[^"]|"")*+("?)')
"""A cell of a CSV file in quotes; its group is empty if the quote is never closed."""

NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
"""A cell of a CSV file that reads as a number."""

TRUTHS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}

VALUES: Mapping[str, Callable[[str], Any]] = {
    "text": str,
    "true or false": TRUTHS.__getitem__,
    "number": lambda cell: int(cell) if cell.lstrip("-").isdigit() else float(cell),
}
"""Kind of a CSV file's column to the value of a cell."""

SPLITS = "dataset_dict.json"
"""The file in a folder of several splits, each in a folder of its own."""


Rows = tuple[list[Any], Callable[[int], str]]
"""Rows, and what gives the place of the row of a number, for messages."""


def read_rows(source: Any, *, text: Sequence[str] = (), least: int = 1) -> Rows:
    """Return the rows of a source, and a function that gives the place of one of them.

    Args:
        source: A path, from the current folder; a list; a `datasets.Dataset`; a data frame; or any other iterable.
        text: The columns of a CSV file that hold text, whatever their cells look like.
        least: A file with fewer rows is an error.

    Raises:
        AgentrigError: The file does not exist, has no rows, can't be read, or is of another kind; the message names the
            line.
    """
    if isinstance(source, str | Path):
        return _of_path(Path(source).expanduser(), text, least)
    records = getattr(source, "to_dict", None)
    if records is not None and hasattr(source, "columns"):  # a data frame of pandas
        check_names(map(str, source.columns), "the data frame")
        return [_plain(row) for row in records(orient="records")], _numbered()
    if isinstance(source, Iterable) and not isinstance(source, Mapping):
        return [_plain(row) for row in source], _numbered()
    raise AgentrigError(f"rows are a list, a data frame, or a path to {KINDS}; this is {source!r:.100}")


def read_json(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield what a file of JSON holds, whatever its ending: a value a line, the items of a list, or one value.

    Yields:
        The place, for messages, and the value. A line that is no JSON, or not UTF-8, is the error that says so: the
        last one of a file may be cut.

    Raises:
        AgentrigError: The file can't be read, is empty, or is no JSON from its first line on.
    """
    try:
        check_regular(path)
        data = path.read_bytes()
    except OSError as error:
        raise AgentrigError(f"{path} can't be read: {error.strerror}") from error
    lines = [(number, line) for number, line in enumerate(data.split(b"\n"), 1) if line.strip()]
    if not lines:
        raise AgentrigError(f"{path} is empty")
    values: list[Any] = []
    for number, line in lines:
        try:
            values.append(_parsed(_text(line, path, number), path, number))
        except AgentrigError as error:
            if len(lines) == 1:
                raise
            if not values:
                break
            values.append(error)
    if len(values) > 1:
        yield from ((f"{path}, line {number}", value) for (number, _), value in zip(lines, values, strict=True))
        return
    value = values[0] if values else _parsed(_text(data, path), path)
    place = _numbered(path)
    yield from ((place(i), item) for i, item in enumerate(value)) if isinstance(value, list) else ((str(path), value),)


def _numbered(path: Path | None = None) -> Callable[[int], str]:
    return lambda number: f"{f'{path}, ' if path else ''}row {number} (the first is 0)"


def _at_lines(path: Path, lines: Sequence[int]) -> Callable[[int], str]:
    return lambda number: f"{path}, line {lines[number]}"


def splits_of(source: Any) -> Sequence[str]:
    """Return the splits of a folder that has several; empty for every other source."""
    if not isinstance(source, str | Path):
        return ()
    file = Path(source).expanduser() / SPLITS
    return tuple(json.loads(file.read_text())["splits"]) if file.is_file() else ()


def _of_path(path: Path, text: Sequence[str], least: int) -> Rows:
    if path.is_symlink() and not path.exists():
        raise AgentrigError(f"{path} is a link to {path.readlink()}, which leads to no file; mend the link")
    if not path.exists():
        known = nearest_path(path.absolute())
        raise AgentrigError(f"there is no {path.absolute()}; a path of a table starts in the current folder.{known}")
    read = _folder if path.is_dir() else READERS.get(path.suffix.lower())
    if read is None:
        raise AgentrigError(f"{path} has an unknown ending; rows are read from {KINDS}")
    if not path.is_dir() and not path.is_file():
        raise AgentrigError(f"{path} is no regular file; rows are read from {KINDS}")
    try:
        if not path.is_dir() and _starts_with(path, LFS):
            raise AgentrigError(f"{path} is a pointer of Git LFS, not the file itself; download it: git lfs pull")
        rows, place = _csv(path, text) if read is _csv else read(path)
        if len(rows) < least:
            raise AgentrigError(f"{path} has no rows{', only the names of its columns' if read is _csv else ''}")
        return rows, place
    except AgentrigError:
        raise
    except (OSError, ValueError, KeyError) as error:  # pyarrow's own errors are of these kinds
        raise AgentrigError(f"{path} can't be read: {error}") from error


def _starts_with(path: Path, start: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(start)) == start


def utf8_text(path: Path) -> str:
    """Return a file's text; a byte order mark is left out.

    Raises:
        OSError: It can't be read.
        AgentrigError: It has bytes that are not UTF-8; the message names the first by line and character.
    """
    data = path.read_bytes()
    if 0 in data[:4] and data[:2] not in STARTS:  # UTF-8 text has no such byte, and UTF-16 has one in each letter
        order = "be" if data[0] == 0 else "le"
        cure = f"save it as UTF-8: iconv -f utf-16{order} -t utf-8 OLD > NEW"
        raise AgentrigError(f"{path} is UTF-16 text, to judge by its first bytes; {cure}")
    return _text(data, path)


def _text(data: bytes, path: Path, first: int = 1) -> str:
    """Return the text of a file, or of a part of it that begins with a line; see `utf8_text`."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if known := STARTS.get(data[:2]):
            raise AgentrigError(f"{path} {known}") from None
        start = data.rfind(b"\n", 0, error.start) + 1
        line, character = data.count(b"\n", 0, start) + first, len(data[start : error.start].decode("utf-8-sig")) + 1
        wrong = NOT_UTF8.format(data[error.start], AS_UTF8)
        raise AgentrigError(f"{path}, line {line}, character {character}: {wrong}") from None


def _parquet(path: Path) -> Rows:
    import pyarrow.parquet as pq

    check_names(pq.read_schema(path).names, path)  # pyarrow reads no such table
    return _of_table(pq.read_table(path), path)


def check_names(names: Iterable[str], place: object) -> None:
    """Raise `AgentrigError` if two columns have one name."""
    for name, n in Counter(names).items():
        if n > 1:
            raise AgentrigError(f'{place}: two columns are called "{name}"')


def _of_table(table: Any, path: Path) -> Rows:
    """Return the rows of an Arrow table; a text of another encoding is named by row and column."""
    check_names(table.column_names, path)
    place = _numbered(path)
    try:
        return table.to_pylist(), place
    except UnicodeDecodeError:
        for name in table.column_names:
            for number, cell in enumerate(table[name]):
                try:
                    cell.as_py()
                except UnicodeDecodeError as error:
                    wrong = NOT_UTF8.format(error.object[error.start], "store the column as text, which is UTF-8")
                    raise AgentrigError(f"{place(number)}, column {name}: {wrong}") from None
        raise


def _csv(path: Path, text: Sequence[str] = ()) -> Rows:
    """Read a CSV file with a header; a column whose cells are all numbers, or all true or false, gets such values.

    A column is numbers only if each of its cells is what the number is written as: 10.00, 007, +1 or 1e3 makes it text.
    """
    csv.field_size_limit(sys.maxsize)  # a cell may hold a whole document
    data = utf8_text(path)
    numbered = enumerate(map(str.rstrip, io.StringIO(data, newline=None)), 1)
    first, names = next(((number, row) for number, row in numbered if row), (1, ""))
    if names.lower().startswith("sep="):
        raise AgentrigError(f"{path}, line {first}: {names!r:.80} is only for Excel; remove this line")
    other = next((mark for mark in (";", "\t", "|") if mark in names and "," not in names), "")
    if other:
        raise AgentrigError(
            f"{path}, line {first}: the header is one column, {names!r:.80}: its cells are separated by {other!r}. "
            "Save it with commas"
        )
    reader = csv.reader(io.StringIO(data, newline=""), strict=True)
    cells: list[list[str]] = []
    lines: list[int] = []
    line = 1
    try:
        for row in reader:
            if row:  # an empty line has none
                cells.append(row)
                lines.append(line)
            line = reader.line_num + 1
    except csv.Error as error:
        opened = next((found.start() for found in QUOTED.finditer(data) if not found[1]), None)
        if opened is not None:
            at = data.count("\n", 0, opened) + 1
            raise AgentrigError(f"{path}: a quote that is opened in line {at} is never closed") from None
        raise AgentrigError(
            f"{path}, line {line}: {error}; a quote in a cell with quotes around it is written twice"
        ) from None
    if not cells:
        raise AgentrigError(f"{path} is empty; its first line must name the columns")
    header, *cells = cells
    place = _at_lines(path, lines[1:])
    for number, name in enumerate(header):
        if not name.strip():
            _tell_of_blank_header(f"{path}, line {lines[0]}", number, header, cells)
    check_names(header, f"{path}, line {lines[0]}")
    for name in text:
        if name not in header:
            raise AgentrigError(
                f"{path}, line {lines[0]}: there is no column {name}, which tasks.text names.{nearest(name, header)}"
            )
    for number, row in enumerate(cells):
        if len(row) != len(header):
            if names.startswith("#"):
                comment = f"{names!r:.80} is read as the header; if it is a comment, remove this line"
                raise AgentrigError(f"{path}, line {first}: {comment}")
            more = "put a cell with a comma in quotes, and separate cells with commas"
            wrong = "a cell is missing, or the header has one too many" if len(row) < len(header) else more
            cells_of = f"{len(row)} cell{'' if len(row) == 1 else 's'}"
            raise AgentrigError(f"{place(number)} has {cells_of}, and the header has {len(header)}: {wrong}")
    columns = []
    for name, column in zip(header, zip(*cells, strict=True), strict=False):
        kinds = Counter(kind for kind in map(_kind, column) if kind)
        kind = "text" if name in text or not kinds else kinds.most_common(1)[0][0]
        if kind == "number" and any(NUMBER.fullmatch(cell) and not is_written_number(cell) for cell in column):
            kind = "text"
        if kind != "text" and len(kinds) > 1:
            if 2 * kinds[kind] > kinds.total():
                number = next(i for i, cell in enumerate(column) if _kind(cell) not in ("", kind))
                raise AgentrigError(
                    f"{place(number)}, column {name}: {column[number]!r:.80} is no {kind}, and {kinds[kind]} of "
                    f"{kinds.total()} cells are.\n"
                    f'  Mend it; or if {name} is a column of text, name it among those of text: tasks.text=["{name}"]'
                )
            kind = "text"
        columns.append([VALUES[kind](cell) if kind == "text" or _kind(cell) else None for cell in column])
    return [dict(zip(header, row, strict=True)) for row in zip(*columns, strict=True)], place


def _tell_of_blank_header(place: str, number: int, header: Sequence[str], cells: Sequence[Sequence[str]]) -> NoReturn:
    """Raise the error that a column has no name, with what it probably is: it would be one that agents get."""
    cure = "give it a name"
    if not any("".join(row[number:]).strip() for row in cells) and not "".join(header[number:]).strip():
        cure = "its cells are empty too, so remove the commas at the ends of the lines"
    elif number == 0:
        cure = "if it is the index of pandas, write the file with to_csv(..., index=False); if not, give it a name"
    raise AgentrigError(f"{place}: column {number + 1} has no name: {cure}")


def is_written_number(cell: str) -> bool:
    """Whether a cell of a CSV file is what a number is written as: 10 and 16.8 are; 10.00, 007, +1 and 1e3 are not."""
    return NUMBER.fullmatch(cell) is not None and str(VALUES["number"](cell)) == cell


def _kind(cell: str) -> str:
    """Return what a cell of a CSV file holds; '' if nothing."""
    if is_written_number(cell):
        return "number"
    return "true or false" if cell in TRUTHS else "text" if cell.strip() else ""


def _lines(path: Path) -> Rows:
    rows, lines = [], []
    for number, line in enumerate(utf8_text(path).split("\n"), 1):
        if line.strip():
            rows.append(_parsed(line, path, number))
            lines.append(number)
    return rows, _at_lines(path, lines)


def _parsed(text: str, path: Path, line: int = 0) -> Any:
    """Return JSON text as a value; `line` is its line in a file of JSON Lines, and 0 if it is the whole file."""
    place = f"{path}, line {line}" if line else f"{path}"

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise AgentrigError(f'{place}: an object has the key "{twice}" twice; only one value can count')
        return found

    try:
        return json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise AgentrigError(
            f"{path}, line {line or error.lineno} is no JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
            f"{_other_json(text, path, error, lines=bool(line))}"
        ) from None
    except RecursionError:
        raise AgentrigError(f"{place} {DEEP_WORDS}; write an inner part as text") from None
    except ValueError:  # the only other one: more digits than Python reads
        raise AgentrigError(f"{place} holds {LARGE_WORDS}; write it as text") from None


def _other_json(text: str, path: Path, error: json.JSONDecodeError, *, lines: bool) -> str:
    """Return what a text is that is no JSON, or no JSON Lines, and what to do; '' if that is not known.

    Args:
        text: The file's text, or one of its lines.
        lines: Whether it should be JSON Lines.
    """
    rest = text[error.pos :].strip()
    if lines and error.msg == "Extra data" and rest == ",":
        return ". A line of JSON Lines ends without a comma; remove it"
    if lines and (text.strip() in ("[", "{") or (error.msg == "Expecting value" and text.lstrip().startswith("["))):
        return f". If it is one JSON value over several lines, rename the file to {path.stem}.json"
    if not lines and error.msg == "Extra data" and error.colno == 1 and rest.startswith("{"):
        return f". If each line is a value of its own, rename the file to {path.stem}.jsonl"
    return ""


def _json(path: Path) -> Rows:
    rows = _parsed(utf8_text(path), path)
    if not isinstance(rows, list):
        raise AgentrigError(f"{path} holds {json_kind(rows)}; write a list of rows")
    return rows, _numbered(path)


def _arrow(path: Path) -> Rows:
    """Read Arrow's stream format, which Hugging Face `datasets` writes, or its file format."""
    import pyarrow as pa

    with pa.memory_map(str(path)) as data:
        try:
            return _of_table(pa.ipc.open_stream(data).read_all(), path)
        except pa.ArrowInvalid:
            data.seek(0)
            return _of_table(pa.ipc.open_file(data).read_all(), path)


def _folder(path: Path) -> Rows:
    """Read what `Dataset.save_to_disk` wrote: its state names the files in their order."""
    state = path / "state.json"
    if (path / SPLITS).is_file():
        raise AgentrigError(f"{path} has the splits {', '.join(splits_of(path))}; name one: {path}/SPLIT")
    if not state.is_file():
        raise AgentrigError(f"{path} is no folder that Dataset.save_to_disk wrote: it has no state.json")
    files = [path / part["filename"] for part in json.loads(state.read_text())["_data_files"]]
    return [row for file in files for row in _arrow(file)[0]], _numbered(path)


READERS: Mapping[str, Callable[[Path], Rows]] = {
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
