"""Reads run directories: missing or broken files are noted and are not errors."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from agentrig.correctness import CORRECT_AT, as_much
from agentrig.errors import AgentrigError, RunFileError, nearest_path
from agentrig.figures import number
from agentrig.processes.locks import Lock
from agentrig.run.checkpoints import Checkpoints
from agentrig.run.damage import CURES, entries, read_object, reading
from agentrig.run.directory import (
    ENDED,
    RunDirectory,
    check_format,
    checked_summary,
    foreign_folders,
    is_end,
    read_metrics,
)
from agentrig.run.manifest import EDITED, edited_settings, settings_before
from agentrig.run.past import (
    Resumable,
    changed_files,
    contradictions,
    foreign_metrics,
    is_as_written,
    last_ended,
    losses,
    lost_checkpoints,
    measurement_faults,
    possible,
    recorded_digests,
    resumable,
    reward_contradictions,
    unwhole,
    unwritten,
)
from agentrig.run.rows import rollout_schema
from agentrig.traces import Span, items
from agentrig.traces import mapping as mapping

GO_ON = ". Go on after the last step that was saved"
"""Begins the advice in a note that a run was killed."""

SECOND = "second_rewards"
"""Of a step: the figures of each reward in `run.second_reward`, by name. Of a rollout: the score of each."""

FIGURES = ("id", "task_id", "failure", "message", "status", "value", "correct", "details")
"""The columns that are read for every rollout; input, answer and spans are read only for the few that are shown."""

CHANGED = "changed since the run wrote it"
"""What the damage of such a file is."""

WARNINGS = 200
"""Warnings of a run that are read; the newest."""

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.compute import Expression

T = TypeVar("T")

_FILE = re.compile(r"(train|validation|report|dev)-([0-9]{5}|[1-9][0-9]{5,})\.parquet")


@attrs.frozen(kw_only=True)
class RolloutFile:
    """One Parquet file of `rollouts/`: all rollouts of a mode and step.

    Attributes:
        recorded: Its SHA-256 as the run wrote it; None if that is not known.
        damage: Why it cannot be read, one sentence each; it grows as it is read.
    """

    mode: str
    step: int
    path: Path
    recorded: str | None = attrs.field(default=None, eq=False)
    damage: list[str] = attrs.field(factory=list, eq=False, repr=False)

    @property
    def place(self) -> str:
        """Its place in the run directory."""
        return f"rollouts/{self.path.name}"

    @property
    def version(self) -> tuple[int, int]:
        """What changes when the file does; zeros if it has gone."""
        try:
            state = self.path.stat()
        except OSError:
            return 0, 0
        return state.st_mtime_ns, state.st_size


class Seen:
    """What was read of a run's files; pass it again, and only new files are read."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], tuple[tuple[int, int], Any, list[str]]] = {}

    def of(self, file: RolloutFile, read: Callable[[RolloutFile], T]) -> T:
        """Return what `read` makes of a file; it is called again only if the file has changed."""
        key, version = (read.__name__, file.path.name), file.version
        kept = self._kept.get(key)
        if kept is None or kept[0] != version:
            kept = self._kept[key] = version, read(file), list(file.damage)
        file.damage.extend(text for text in kept[2] if text not in file.damage)
        found: T = kept[1]
        return found


@attrs.frozen(kw_only=True, slots=False)
class RunData:
    """The content of a run directory.

    Attributes:
        config: `config.toml`, section to keys.
        steps: The lines of `metrics.jsonl` in order of their step, without figures that no run can have; for a step
            that ran twice (in a resumed run) the later line.
        summary: `summary.json`; empty until the run has ended.
        progress: `progress.json`: the held-out measurements made so far, under `before` and `after`.
        error: `error.json`: the error that ended the run; empty without one. A resumed run removes it.
        unread: What is missing or cannot be read, one sentence each, without what `missing` adds.
        running: Whether a process holds the run's lock, and has not written how the run ended.
        resuming: Whether it is at work, and has ended no step yet after an earlier part: that one's end still holds.
        continued: Whether the run was killed, or failed, after it went on from an earlier end and before the next
            checkpoint replaced that: the other attributes are of the earlier end.
        binned: Whether its curves have one point for each 16 steps, as published ones, and no moving mean.
        ended: The last step that has ended, as far as any of its files tells.
        seen: What was read of its rollouts.
    """

    directory: Path
    config: Mapping[str, Any]
    config_text: str
    manifest: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any]
    progress: Mapping[str, Any]
    error: Mapping[str, Any]
    files: Sequence[RolloutFile]
    unread: Sequence[str]
    running: bool = False
    resuming: bool = False
    continued: bool = False
    binned: bool = False
    ended: int = 0
    seen: Seen = attrs.field(factory=Seen, repr=False)

    @cached_property
    def missing(self) -> Sequence[str]:
        """What is missing, cannot be read, or is not what the run wrote, one sentence each; it reads every file."""
        ended = self.ended if self.summary.get("complete") and not self.continued else None
        try:
            changed = changed_files(self.directory, self.steps, self.progress, ended=ended, running=self.running)
        except RunFileError as error:
            changed = [first_line(error)]
        measured = contradictions(self.directory, progress=self.progress, summary=self.summary, lines=self.steps)
        apart = [*(text for _, text in measured), *reward_contradictions(self.directory, self.steps)]
        return list(dict.fromkeys([*self.unread, *changed, *apart]))

    @cached_property
    def checkpoint(self) -> Resumable:
        """What a resume would say of its latest checkpoint.

        Raises:
            RunFileError: What it would be compared with cannot be read.
        """
        return resumable(RunDirectory(self.directory))

    @property
    def damage(self) -> list[str]:
        """Why its rollouts cannot be read, one sentence each, as far as somebody has read them."""
        told = dict.fromkeys(text for file in self.files for text in file.damage)
        return [text for text in told if not text.endswith(CHANGED)]  # `missing` names those

    @property
    def name(self) -> str:
        """The run's name: the manifest's, else the directory's."""
        return str(self.manifest.get("name") or Path(os.path.abspath(self.directory)).name)

    @property
    def recipe(self) -> str:
        """The recipe's name, or an empty string."""
        return str(self.manifest.get("recipe") or "")

    def setting(self, section: str, key: str) -> Any:
        """Return a key of the configuration, or None."""
        return dig(self.config, section, key)

    @cached_property
    def changes(self) -> Sequence[tuple[int, str, Any]]:
        """What resumes have changed of settings: after which step, `section.key`, and the value until then, in order.

        Left out is what changes no rollout and no update, such as the number of steps.
        """
        changed = [mapping(each) for each in items(self.manifest.get("changes"))]
        return [
            (int(number(each.get("after")) or 0), key, value)
            for each in changed
            for key, value in settings_before(each).items()
        ]

    @property
    def done(self) -> int:
        """How many steps have ended, by their number: the line of some in `metrics.jsonl` may be lost."""
        return max([self.ended, *(int(line["step"]) for line in self.steps)])

    def setting_at(self, step: int, key: str) -> Any:
        """Return the value that a dotted key had in a step, or None."""
        now = dig(self.config, *key.split("."))
        return next((was for after, changed, was in self.changes if changed == key and step <= after), now)

    def of_mode(self, mode: str) -> list[RolloutFile]:
        """Return the rollout files of a mode, by step."""
        return sorted((f for f in self.files if f.mode == mode), key=lambda f: f.step)

    def measured(self) -> list[RolloutFile]:
        """Return the files of measurements of one split: held out if there are two, else validation; or none."""
        return next((files for mode in ("report", "validation") if len(files := self.of_mode(mode)) > 1), [])


def dig(value: Any, *keys: str) -> Any:
    """Return what is under these keys, one inside the other; None where one is missing."""
    for key in keys:
        value = mapping(value).get(key)
    return value


def is_correct(row: Mapping[str, Any]) -> bool:
    """Return whether a rollout counts as correct."""
    return bool(row.get("correct"))


def verdict(row: Mapping[str, Any]) -> str:
    """Return `right`, `wrong`, `part` (not correct, but a value above 0) or `failed` (not scored)."""
    value = number(row.get("value"))
    if row.get("failure") or value is None:
        return "failed"
    return "right" if is_correct(row) else "wrong" if value <= 0 else "part"


def judged(row: Mapping[str, Any]) -> str:
    """Return a rollout's verdict in words: a reward that is whole, of an answer that is not correct, is no part."""
    found, value = verdict(row), number(row.get("value")) or 0.0
    return "full reward, counted as wrong" if found == "part" and as_much(value, CORRECT_AT) else found


def spans_of(value: Any) -> list[Span]:
    """Return the spans of a rollout's row; fields that are missing or odd in a damaged file are empty."""
    return [
        Span(
            id=str(span.get("id")),
            parent=None if span.get("parent") is None else str(span["parent"]),
            name=str(span.get("name") or "span"),
            start=number(span.get("start")) or 0.0,
            end=number(span.get("end")) or 0.0,
            error=str(span["error"]) if span.get("error") else None,
            attributes=mapping(span.get("attributes")),
        )
        for span in (value if isinstance(value, list) else ())
        if isinstance(span, Mapping)
    ]


def no_run(path: Path) -> str:
    """Return what is said about a path that is no run directory."""
    known = nearest_path(path)
    return f"there is no run directory {path}{f'.{known}' if known else '; `agentrig train` makes them below runs/'}"


def read_run(directory: Path, seen: Seen | None = None) -> RunData:
    """Read a run directory without its rollouts; `seen` is what was read of these before.

    Raises:
        AgentrigError: There is no such directory, or nothing in it that a run writes, or its format is of a later
            version.
    """
    directory = Path(directory)
    lock, before = Lock(directory / "run.lock"), os.path.lexists(directory / "summary.json")
    locked = lock.held()  # before the files: a run that ends now has written them
    running = locked and not any(lock.taken_before(directory / name) for name in ENDED)
    if not directory.is_dir():
        raise AgentrigError(no_run(directory))
    missing: list[str] = []
    text = str(_read(directory / "config.toml", _text, missing) or "")
    odd = _not_utf8(directory / "config.toml") if "\N{REPLACEMENT CHARACTER}" in text else ""
    missing += [f"{odd}. {CURES['config.toml']}"] if odd else []
    whole = text.removeprefix("\N{BYTE ORDER MARK}")
    config = _read(directory / "config.toml", lambda _: tomllib.loads(whole), [] if odd else missing) if text else {}
    manifest = _read(directory / "manifest.json", read_object, missing, needed=not running)
    if not text.strip() and (directory / "config.toml").is_file() and not missing:
        missing.append(f"config.toml is empty. {CURES['config.toml']}")
    try:
        check_format(directory, manifest)
    except RunFileError as wrong:
        missing.append(first_line(wrong))
        manifest = {}
    if config and not running:
        missing += [EDITED.format(*edited) for edited in edited_settings(config, manifest)]
    saved = not running and any((directory / "checkpoints").glob("step-*"))
    error = {} if running else _read(directory / "error.json", read_object, missing, needed=False)
    several = len(list((directory / "rollouts").glob("train-*"))) > 1
    stepless = bool(error) and not saved and not several  # its error says why no step has ended
    lines = str(_read(directory / "metrics.jsonl", _text, missing, needed=not (running or stepless)) or "")
    told, damaged = read_metrics(lines)
    if "\N{REPLACEMENT CHARACTER}" in lines:
        missing += filter(None, [_not_utf8(directory / "metrics.jsonl")])
    files: list[RolloutFile] = []
    others: dict[str, str] = {}
    try:
        files += rollout_files(directory / "rollouts")
        others = foreign_folders(directory)
        missing += [f"{text}. What this run did not write there is left out" for text in others.values()]
    except RunFileError as closed:
        missing.append(first_line(closed))
    if not (text or manifest or lines or files):
        raise AgentrigError(
            f"{directory} is not a run directory: it has no config.toml, manifest.json, metrics.jsonl or rollouts/"
        )
    summary: Any = {}
    if before or not running:
        file = directory / "summary.json"
        summary = _read(file, lambda file: checked_summary(read_object(file)), missing, needed=False)
    resuming = running and bool(summary) and max((line["step"] for line in told), default=0) <= summary.get("steps", 0)
    resuming |= running and os.path.lexists(directory / "error.json")
    summary = {} if running else summary
    if not running and not any(os.path.lexists(directory / name) for name in ENDED):
        missing.append(
            "summary.json is not there, and no process holds run.lock: the run was killed, or this is a copy of a "
            f"running one{GO_ON}: agentrig train --resume {directory}"
        )
    done = int(number(summary.get("steps")) or 0)
    more = (number(dig(config, "algorithm", "steps")) or 0) > done and not summary.get("solved")
    continued = (
        bool(summary.get("complete")) and more and done < max([0, *(f.step for f in files if f.mode != "report")])
    )
    if continued:
        missing.append(
            f"the run went on after step {done} and did not reach the next checkpoint: this is its end after it. "
            f"Go on: agentrig train --resume {directory}"
        )
        told, files = [line for line in told if line["step"] <= done], [f for f in files if f.step <= done]
    progress = _read(directory / "progress.json", read_object, missing, needed=saved)
    if foreign := foreign_metrics(directory, told, progress):
        missing.append(f"{foreign}. It is left out: restore it from a copy")
        told, damaged = [], []
    checkpoints = None if "checkpoints" in others else Checkpoints(directory / "checkpoints")
    done = max([done, *(line["step"] for line in told)])
    if not (running or continued):  # at work, it may have ended a step since its lines were read
        try:
            done = max(done, last_ended(checkpoints, progress, told))
        except RunFileError as closed:
            missing.append(first_line(closed))
    missing += losses(told, damaged, done) if not foreign else []
    if os.path.lexists(directory / "audit"):
        from agentrig.run.auditing import read_audits, totals_of

        audits, unread = read_audits(directory)
        missing += unread
        if unread and "audited" in summary:
            summary["audited"] = totals_of(audits)
    if checkpoints is not None and not running:
        try:
            missing += [*lost_checkpoints(checkpoints, progress), *unwhole(checkpoints)]
        except RunFileError as damaged_record:
            missing.append(first_line(damaged_record))
    if running and not resuming and "after" in progress:  # of an earlier end, until the next checkpoint
        del progress["after"]
        files = [f for f in files if not is_end(f.path)]
    for name, held, keys in (
        ("progress.json", progress, ("before", "after")),
        ("summary.json", summary, ("accuracy", "reward")),
    ):
        missing += [f"{name} is damaged: {fault}" for fault in measurement_faults(held, keys)]
    by_step = {line["step"]: possible({**line, "algorithm": mapping(line.get("algorithm"))})[0] for line in told}
    recorded = recorded_digests(told, progress)
    if running or manifest.get("resumed"):  # a resumed run measures its checkpoint again, and records that later
        recorded = {name: digest for name, digest in recorded.items() if not name.startswith("rollouts/validation-")}
    over = done if summary.get("complete") and not continued else None
    strange = unwritten([f.place for f in files], told, progress, ended=over)
    files = [f for f in files if f.place not in strange]
    files = [attrs.evolve(f, recorded=recorded.get(f.place)) for f in files]
    files = [f for f in files if f.recorded or "rollouts" not in others]
    if not told and not (running or done or stepless or foreign):
        missing.append("no training step has ended")
    if not files and not (running or stepless):
        missing.append("rollouts/ holds no rollouts")
    return RunData(
        directory=directory,
        config=config,
        config_text=text,
        manifest=manifest,
        steps=[by_step[step] for step in sorted(by_step)],
        summary=summary,
        progress=progress,
        error=error,
        files=files,
        unread=missing,
        seen=seen or Seen(),
        running=running,
        resuming=resuming,
        continued=continued,
        ended=done,
    )


def warnings_of(run: RunData) -> list[dict[str, Any]]:
    """Return what the run has warned of so far, the newest first: `step`, `level` and `text`."""
    try:
        with reading(run.directory / "log.jsonl"):
            text = (run.directory / "log.jsonl").read_text("utf-8", "replace")
    except (OSError, RunFileError):
        return []
    found = []
    for line in text.splitlines()[-WARNINGS:]:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        # A line that is damaged says nothing.
        if isinstance(value, dict) and type(value.get("step")) is int and isinstance(value.get("text"), str):
            found.append({"step": value["step"], "level": value.get("level"), "text": value["text"]})
    return found[::-1]


def columns_of(
    file: RolloutFile,
    columns: Sequence[str],
    ids: Collection[str] | None = None,
    optional: Collection[str] = (),
) -> pa.Table | None:
    """Return columns of a file, of all rollouts or those with some ids; None without one to trust: see its `damage`.

    A file that was changed since the run wrote it is not read.

    With `ids`, the columns must have `id`.
    """
    import pyarrow as pa
    import pyarrow.parquet

    if not is_as_written(file.path, file.recorded):
        if (told := f"rollouts/{file.path.name}: {CHANGED}") not in file.damage:
            file.damage.append(told)
        return None
    try:
        # a file for itself: a data set of one file takes ten times as long
        with reading(file.path), pyarrow.parquet.ParquetFile(file.path) as parquet:
            lacks = set(columns) - set(parquet.schema_arrow.names)
            if needed := lacks - {SLICES, *optional}:  # what rollouts are broken down by is no figure
                raise ValueError(f"it has no column {min(needed)}")
            columns = [name for name in columns if name not in lacks]
            for name in columns:
                there, written = parquet.schema_arrow.field(name).type, rollout_schema(pa).field(name).type
                if there != written:
                    raise ValueError(f"its column {name} holds {there}, not {written}")
            if ids is None:
                return parquet.read(columns=list(columns), use_threads=False)
            batches = (pa.Table.from_batches([batch]) for batch in parquet.iter_batches(columns=list(columns)))
            found = [batch.filter(one_of("id", ids)) for batch in batches]
            return pa.concat_tables(found) if found else None
    except (OSError, RunFileError) as error:
        cause = error.__cause__ or error
        why = getattr(cause, "strerror", None) or first_line(cause)
        if (told := f"rollouts/{file.path.name} cannot be read: {why}") not in file.damage:
            file.damage.append(told)
        return None


def rows_in(file: RolloutFile) -> int:
    """Return how many rollouts a file has; 0 if it cannot be read: see its `damage`."""
    table = columns_of(file, ("mode",))
    return 0 if table is None else int(table.num_rows)


def one_of(column: str, values: Collection[str]) -> Expression:
    """Return the filter of a table's rows whose column has one of these texts."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.field(column).isin(pa.array(list(values), pa.string()))


def rollout_rows(
    files: Iterable[RolloutFile],
    columns: Sequence[str] = FIGURES,
    *,
    ids: Collection[str] | None = None,
    decode: bool = True,
    optional: Collection[str] = (),
) -> Iterator[dict[str, Any]]:
    """Yield rollouts of Parquet files as dicts; JSON columns are decoded.

    Args:
        columns: Which columns, in addition to `mode` and `step`.
        decode: False leaves JSON columns as text.
        optional: Columns that a file may lack: their values are then None.
    """
    for file in files:
        table = columns_of(file, columns, ids, optional)
        more = {"mode": file.mode, "step": file.step}
        lacks = dict.fromkeys(optional)
        for row in table.to_pylist() if table is not None else ():
            yield lacks | (decoded(row) if decode else row) | more


SLICES = "slices"
"""The column with the class of a rollout's task in each slice; a file may lack it."""

JSON_COLUMNS = frozenset({"components", "details", "call_values", "input", SLICES, "answer", "spans", SECOND})


def decoded(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with its JSON columns as values; damaged JSON stays text."""
    found = dict(row)
    for column in JSON_COLUMNS & row.keys():
        if isinstance(row[column], str):
            with contextlib.suppress(ValueError, RecursionError):
                found[column] = json.loads(row[column])
    return found


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its type if it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _read(path: Path, read: Callable[[Path], Any], missing: list[str], *, needed: bool = True) -> Any:
    """Return what `read` makes of a file; an empty dict without it or if it cannot be read, which is noted."""
    if not os.path.lexists(path):
        missing += [f"{path.name} is not there"] if needed else []
        return {}
    if path.is_symlink() and not path.exists():
        missing.append(f"{path.name} is a link to what is not there: {os.readlink(path)}")
        return {}
    try:
        with reading(path):
            return read(path)
    except (OSError, RunFileError) as error:
        missing.append(first_line(error))
        return {}


def _text(path: Path) -> str:
    return path.read_text("utf-8", "replace")


def _not_utf8(path: Path) -> str:
    """Say that a file has bytes that are no text; '' if it has none."""
    try:
        path.read_text("utf-8")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        return f"{path.name} is damaged: line {line} has bytes that are no UTF-8 text; read as far as it can be"
    return ""


def rollout_files(folder: Path) -> Iterator[RolloutFile]:
    """Yield the rollout files of a folder, by name; other files belong to the user."""
    for path in entries(folder):
        match = _FILE.fullmatch(path.name)
        if match:
            yield RolloutFile(mode=match[1], step=int(match[2]), path=path)
