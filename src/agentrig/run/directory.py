"""The run directory: all files of a run."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrig.errors import CheckpointDamaged, ConfigError, RunFileError, RunInUse
from agentrig.figures import number
from agentrig.plan import Plan, RunSettings, to_toml
from agentrig.processes.locks import Lock
from agentrig.rewards import Score
from agentrig.rollouts import Rollout
from agentrig.run.checkpoints import Checkpoints, read_state
from agentrig.run.damage import CURES, read_object, reading, writing
from agentrig.run.files import append_line, replacing, sha256_of, write_whole
from agentrig.run.manifest import FORMAT
from agentrig.run.rows import call_schema, rollout_schema, row_of
from agentrig.text import LONE_SURROGATE, cut, open_own, read_text, storable, whole_characters, without_nan
from agentrig.traces import mapping

ROLLOUTS = re.compile(r"[a-z]+-\d+\.parquet")
"""Name of a rollout file: `MODE-STEP.parquet`; other files in that folder belong to the user."""

FILES = "files"
"""The key of `metrics.jsonl` and `progress.json` with the SHA-256 of the files of rollouts and calls."""

log = logging.getLogger(__name__)

LAST_STEP = 10**9
"""No run has more steps: a larger number in `metrics.jsonl` is damage."""

FOLDERS = ("rollouts", "calls", "checkpoints", "plots")

ENDED = ("error.json", "summary.json")
"""What the end of a run writes; a resumed run removes them."""

DAMAGED = "metrics.jsonl.damaged"
"""What a resume keeps of a `metrics.jsonl` with lines that cannot be read: the whole files, one after the other."""

REWRITTEN = ("metrics.jsonl", DAMAGED, "progress.json", "config.toml", "manifest.json", "checkpoints/latest")
"""What a resumed run writes again."""

LINKED = (*FOLDERS, "audit")
"""The folders that may be links to a larger disk."""

OWNER = ".run"
"""In a folder that a run has by a link: the place of that run."""

BESIDE = ("log.jsonl", "report.html")
"""What else a run has written when it ends before its first step."""

LONGEST_NAME = 200
"""Longest run name in bytes; file systems allow 255, and some file names are longer than the run's name."""


def see_rollouts(directory: Path) -> str:
    """Return the advice to look at rollouts that a run has recorded, with the command: new ones need not be alike."""
    return f"See its rollouts, with every span: agentrig watch {shlex.quote(str(directory))}"


class RunDirectory:
    """One run's files; see `docs/report.md` for each.

    Args:
        path: The directory; if it holds no run yet, it and its folders are created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / "config.toml").exists():
            self._make_folders()
        self.checkpoints = Checkpoints(path / "checkpoints")
        self._lock = Lock(path / "run.lock")
        self._first = False  # whether its folder was made for it

    @classmethod
    def create(cls, plan: Plan) -> RunDirectory:
        """Create and lock a new run directory; runs without a `run.name` that start together get different ones.

        A run of that name that ended before its first step is replaced, and the log says so.

        Raises:
            ConfigError: The name is not valid, or a run of that name exists that has a step.
            RunInUse: Another process is creating a run of that name.
        """
        parent = Path(plan.run.directory)
        name = run_name(plan.run, plan.recipe)
        with writing(parent):
            first = not parent.exists()
            parent.mkdir(parents=True, exist_ok=True)
            path = parent / name if plan.run.name else _own_folder(parent, name)
        check_vacant(path)
        made = not (plan.run.name and path.exists())
        try:
            run = cls(path)
            run._first = first
            run.lock()
            if check_vacant(path):  # anew: another run may have started and ended in between
                run.remove_failed()
            run.write("config.toml", to_toml(plan.as_dict()))
        except KeyboardInterrupt:
            if made:
                shutil.rmtree(path, ignore_errors=True)
            if first:
                with contextlib.suppress(OSError):
                    parent.rmdir()
            raise
        return run

    def lock(self) -> None:
        """Keep other runs out of this directory until `release`, or until this process ends.

        A folder that it has by a link, such as `checkpoints` on a larger disk, is claimed for it too.

        Raises:
            RunInUse: Another running process uses it; the message says which.
            RunFileError: A link leads to a folder of another run.
        """
        with writing(self._lock.path):
            taken = self._lock.take()
        if not taken:
            raise RunInUse(f"a run is active in {self.path}: {self._lock.holder()}. Wait until it ends, or stop it")
        try:
            for link in check_links(self.path):
                with writing(link / OWNER):
                    write_whole(link / OWNER, f"{self.path.resolve()}\n")
        except BaseException:
            self._lock.release()
            raise

    def remove(self) -> None:
        """Delete a new run's directory, with all its files; and the folder of runs, if this is its first one."""
        with writing(self.path):
            shutil.rmtree(self.path)
        if self._first:
            with contextlib.suppress(OSError):  # another run may be there by now
                self.path.parent.rmdir()

    def remove_failed(self) -> None:
        """Delete the files of a run that ended before its first step; other files in its directory stay."""
        error = "it was ended by force"
        with contextlib.suppress(RunFileError):
            error = str(self.read_json("error.json").get("message") or error).partition("\n")[0]
        log.info("the run in %s ended before its first step and is replaced: %s", self.path, cut(error, 200))
        with writing(self.path):
            for file in (*self._after(-1), *(self.path / name for name in (*ENDED, *REWRITTEN, *BESIDE))):
                file.unlink(missing_ok=True)

    def release(self) -> None:
        """Allow other runs to use this directory."""
        self._lock.release()

    def _make_folders(self) -> None:
        for part in FOLDERS:
            with writing(self.path / part):
                (self.path / part).mkdir(parents=True, exist_ok=True)

    def write(self, name: str, text: str) -> None:
        """Write a file atomically; it is on the disk when this returns."""
        with writing(self.path / name):
            write_whole(self.path / name, storable(text))

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file atomically."""
        self.write(name, json.dumps(value, indent=2, default=str) + "\n")

    def read_json(self, name: str) -> Any:
        """Return the object that a JSON file holds; an empty one when it is not there."""
        return read_object(self.path / name)

    def manifest(self) -> dict[str, Any]:
        """Return what `manifest.json` holds; an empty object when it is not there."""
        facts = read_object(self.path / "manifest.json")
        check_format(self.path, facts)
        return facts

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """Add a step's line to `metrics.jsonl`; NaN and infinities, which are no JSON, become null.

        Lone surrogates become U+FFFD, as in the files of rollouts.
        """
        with writing(self.path / "metrics.jsonl"):
            append_line(self.path / "metrics.jsonl", _metrics_text(line))

    def read_metrics(self) -> tuple[list[dict[str, Any]], list[int]]:
        """Return what `metrics.jsonl` holds; see the function `read_metrics`."""
        file, text = self.path / "metrics.jsonl", ""
        with contextlib.suppress(FileNotFoundError), reading(file):
            text = file.read_text("utf-8", errors="replace")
        return read_metrics(text)

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of `metrics.jsonl`; a last line cut short by a crash is left out."""
        return self.read_metrics()[0]

    def check_rewind(self, step: int) -> None:
        """Check that `rewind` can do its work, so that it never fails half-way.

        Raises:
            RunFileError: A folder cannot be read or written, or there is a directory where the run has a file.
        """
        for folder in (self.path, *(self.path / part for part in LINKED)):
            if not os.path.lexists(folder):
                continue
            if folder.is_dir():
                with reading(folder):
                    os.scandir(folder).close()
            with writing(folder):
                os.scandir(folder).close()
                tempfile.TemporaryFile(dir=folder).close()  # os.access gives no reason: `chattr +i` is not EACCES
        for file in (*self._after(step), *(self.path / name for name in (*ENDED, *REWRITTEN))):
            if file.is_dir() and not file.is_symlink():
                raise RunFileError(
                    f"{file} is a directory, and the run has a file of that name. Nothing was changed; move it away"
                )

    def rewind(self, step: int, *, keep_end: bool = False) -> None:
        """Delete everything after a step's checkpoint, for a resumed run.

        What the end of the run wrote is deleted too: its error, its summary and its measurement after training. A
        `metrics.jsonl` with lines that cannot be read is kept as `metrics.jsonl.damaged`.

        Args:
            keep_end: Keep summary and measurement, until `remove_end`.
        """
        lines, damaged = self.read_metrics()
        kept = [line for line in lines if line["step"] <= step]
        self._make_folders()
        if damaged:
            with (
                writing(self.path / DAMAGED),
                open(open_own(self.path / DAMAGED, os.O_WRONLY | os.O_APPEND), "ab") as copy,
            ):
                copy.write((self.path / "metrics.jsonl").read_bytes())
        end = self._end() if keep_end else ()
        for file in (self.path / name for name in ENDED):
            if file not in end:
                file.unlink(missing_ok=True)
        self.checkpoints.remove_incomplete()
        self.checkpoints.drop_after(step)  # a resume after a crash from here on finds what the latest one needs
        for file in self._after(step):
            if file not in end:
                file.unlink(missing_ok=True)
        self.write("metrics.jsonl", "".join(_metrics_text(line) + "\n" for line in kept))

    def remove_end(self) -> None:
        """Delete the summary and the measurement after training: a later checkpoint has replaced that end."""
        for file in self._end():
            with writing(file):
                file.unlink(missing_ok=True)

    def _end(self) -> list[Path]:
        """Return the summary, and the rollouts of a measurement after training."""
        measured = [f for f in (self.path / "rollouts").glob("report-*.parquet") if ROLLOUTS.fullmatch(f.name)]
        return [self.path / "summary.json", *(f for f in measured if is_end(f))]

    def _after(self, step: int) -> list[Path]:
        """Return the files that a run resumed from this step makes again, and those that a crash left half written."""
        files = [f for part in ("rollouts", "calls") for f in (self.path / part).glob("*")]
        again = [f for f in files if f.suffix == ".part" or (ROLLOUTS.fullmatch(f.name) and not stays(f, step))]
        audits = [f for f in (self.path / "audit").glob("*-*.json") if not stays(f, step)]
        return [*again, *audits, *self.path.glob(".*.part")]

    def measured(self, step: int, without: Collection[str] = ()) -> dict[str, int]:
        """Return how many rollouts were only measured, by failure; `""` for those without a failure.

        Args:
            step: The checkpoint's step; rollouts that `rewind` would delete are not counted.
            without: Places in the run directory of files that the run did not write.
        """
        import pyarrow.parquet as pq

        found: Counter[str] = Counter()
        for file in (self.path / "rollouts").glob("*.parquet"):
            if f"rollouts/{file.name}" in without:
                continue
            if ROLLOUTS.fullmatch(file.name) and not file.name.startswith("train-") and stays(file, step):
                cure = "Remove it: its rollouts are then missing from the run's failure counts"
                with reading(file, cure), pq.ParquetFile(file) as stored:  # `read_table` takes a folder too
                    kinds = stored.read(columns=["failure"])["failure"].to_pylist()
                found.update(kind or "" for kind in kinds)
        return dict(found)

    def write_rollouts(
        self,
        rollouts: Sequence[Rollout],
        *,
        mode: str,
        step: int,
        second: Mapping[str, Mapping[str, Score]] | None = None,
        limit: int | None = None,
    ) -> str:
        """Write a step's rollouts as Parquet, without the private parts of tasks; return the file's SHA-256.

        Args:
            second: Rollout id to the score of each second reward, if there is one.
            limit: `run.validation_tasks` or `run.report_tasks` as the measurement has it, which a later resume may
                change: it is kept in the file's metadata, for the auditor.
        """
        import pyarrow as pa

        rows = [row_of(r, (second or {}).get(r.id)) for r in rollouts]
        schema = rollout_schema(pa).with_metadata(None if limit is None else {"tasks": str(limit)})
        return self._write_table(pa.Table.from_pylist(rows, schema=schema), table_name(mode, step))

    def write_calls(self, rows: Sequence[Mapping[str, Any]], *, step: int) -> str:
        """Write where the calls of a step's rollouts went (see `StepTotals.rows`); return the file's SHA-256."""
        import pyarrow as pa

        return self._write_table(pa.Table.from_pylist(rows, schema=call_schema(pa)), table_name("calls", step))

    def _write_table(self, table: Any, name: str) -> str:
        import pyarrow.parquet as pq

        target = self.path / name
        with writing(target), replacing(target, target.with_suffix(".part")) as part:
            pq.write_table(table, part, compression="zstd")
            return sha256_of(part)


def _metrics_text(line: Mapping[str, Any]) -> str:
    return json.dumps(whole_characters(without_nan(line)), allow_nan=False)


def descent_of(model: object) -> list[dict[str, Any]]:
    """Return the runs that a starting model comes from, the nearest first; none if it is no run's checkpoint.

    Args:
        model: The setting `algorithm.model`.

    Returns:
        Of each run its name and directory, when it was created, the step whose weights were taken, and their digest.
    """
    checkpoint = Path(str(model)).expanduser().absolute()
    if checkpoint.parent.name != "checkpoints" or not (checkpoint.parents[1] / "config.toml").is_file():
        return []
    run = RunDirectory(checkpoint.parents[1])
    facts, step = run.manifest(), int(checkpoint.name.rpartition("-")[2] or 0)
    with contextlib.suppress(CheckpointDamaged):  # of another loop: its weights are those of its step
        step = read_state(checkpoint)[0]
    line = next((line for line in run.metrics() if line["step"] == step), {})
    weights = mapping(line.get("digests")).get("weights")
    nearest = {"run": run.path.name, "directory": str(run.path), "created": facts.get("created")}
    return [{**nearest, "step": step, "weights": weights}, *facts.get("descent", [])]


def check_format(run: Path, facts: Mapping[str, Any]) -> None:
    """Reject a run directory of a later version, and a `manifest.json` with values of other types.

    Raises:
        ConfigError: It has a later format; the message names the version that wrote it.
        RunFileError: What it says of its format is no number, or settings or components are no objects.
    """
    found, file = facts.get("format", FORMAT), run / "manifest.json"
    if not isinstance(found, int):
        raise RunFileError(f"{file} is damaged: format is {found!r:.80}, not a number. {CURES[file.name]}")
    if found > FORMAT:
        raise ConfigError(
            f"{run} was written by agentrig {facts.get('agentrig', '(no version)')} in format {found}; this version "
            f"reads formats up to {FORMAT}. Use the version that wrote it"
        )
    for key in ("config", "components"):
        held = facts.get(key, {})
        if not isinstance(held, dict) or not all(isinstance(each, dict) for each in held.values()):
            raise RunFileError(
                f"{file} is damaged: {key} is {held!r:.80}, not an object of objects. {CURES[file.name]}"
            )


def checked_summary(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what `summary.json` holds.

    Raises:
        ValueError: Its number of steps or of rollouts, its seconds, or whether it was complete, has another type.
    """
    for key, most in (("steps", LAST_STEP), ("rollouts", 10**15), ("train_rollouts", 10**15), ("wall_s", 10**12)):
        value = summary.get(key, 0)
        if not 0 <= (-1 if number(value) is None else value) <= most:
            raise ValueError(f"{key} is {value!r:.80}, not a number from 0 to {most}")
    complete = summary.get("complete", True)
    if not isinstance(complete, bool):
        raise ValueError(f"complete is {complete!r:.80}, not true or false")
    return summary


def table_name(kind: str, step: int) -> str:
    """Return the name, in the run directory, of a step's file of rollouts of a mode, or of `calls`."""
    return f"calls/train-{step:05d}.parquet" if kind == "calls" else f"rollouts/{kind}-{step:05d}.parquet"


def run_name(settings: RunSettings, recipe: str) -> str:
    """Return the name of a new run's directory: `run.name`, or recipe and time."""
    name = settings.name or f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    wrong = None
    if any(c in name for c in {"/", "\\", os.sep}):
        wrong = "it contains a path; set the folder with run.directory"
    elif name in (".", "..") or name.startswith((".", "-")):
        wrong = 'it begins with "." or "-"'
    elif LONE_SURROGATE.search(name):
        encoding = sys.getfilesystemencoding()
        wrong = f"it has characters that the encoding of the locale, {encoding}, lacks: set LC_ALL=C.UTF-8"
    elif name != name.strip() or not name.isprintable():
        wrong = "it starts or ends with a space, or has characters that cannot be printed"
    elif len(os.fsencode(name)) > LONGEST_NAME:
        wrong = f"it is longer than {LONGEST_NAME} bytes"
    if wrong:
        raise ConfigError(f"run.name = {name!r} cannot name a run's folder: {wrong}")
    return name


def check_links(run: Path) -> list[Path]:
    """Return the folders of a run that are links to folders elsewhere.

    Raises:
        RunFileError: One leads to a folder of another run, or two to the same: a run removes old files there.
    """
    links, foreign = _links(run), foreign_folders(run)
    places: dict[Path, Path] = {}
    for link in links:
        if link.name in foreign:
            raise RunFileError(
                f"{foreign[link.name]}: this run would remove that run's files.\n  Nothing was changed. Put a folder "
                "of this run's own in the link's place, or a link to one"
            )
        twin = places.setdefault(link.resolve(), link)
        if twin is not link:
            raise RunFileError(
                f"{twin} and {link} are links to the same folder, {link.resolve()}.\n  Nothing was changed. Give each "
                "a folder of its own"
            )
    return links


def foreign_folders(run: Path) -> dict[str, str]:
    """Return the folders of a run that are links to a folder of another run, with the words that say so.

    Raises:
        RunFileError: The name of the run that has such a folder cannot be read.
    """
    return {
        link.name: f"{link} is a link to {link.resolve()}, which is a folder of another run, {other}"
        for link in _links(run)
        if (other := _owner(link, run))
    }


def _links(run: Path) -> list[Path]:
    return [run / part for part in LINKED if (run / part).is_symlink() and (run / part).is_dir()]


def _owner(link: Path, run: Path) -> Path | None:
    """Return the other run that has the folder to which a link of a run leads: in its directory, or by a link too."""
    folder, text = link.resolve(), ""
    for around in (folder, *folder.parents):
        if (around / "config.toml").is_file() and (around / "run.lock").is_file():
            return None if around.samefile(run) else around
    with contextlib.suppress(FileNotFoundError), reading(folder / OWNER):
        text = read_text(folder / OWNER).strip()
    other = Path(text or run)
    has_it = any((other / part).is_dir() and (other / part).samefile(folder) for part in LINKED)
    return other if has_it and (other / "config.toml").is_file() and not other.samefile(run) else None


def check_vacant(path: Path) -> bool:
    """Return whether a run is there that ended before its first step, and may be replaced."""
    check_links(path)
    metrics, checkpoints = path / "metrics.jsonl", path / "checkpoints"
    begun = (
        (metrics.exists() and metrics.stat().st_size > 0)
        or (path / "summary.json").exists()
        or any(checkpoints.glob("*step-*"))
        or any((path / "rollouts").glob("train-*"))
    )
    if begun:
        raise ConfigError(f"{path} already has a run; set another run.name, or continue it with --resume {path}")
    return (path / "config.toml").exists()


def _own_folder(parent: Path, name: str) -> Path:
    """Create a new folder with that name, or with the suffix -2, -3 … if it exists."""
    for n in itertools.count(1):
        path = parent / (name if n == 1 else f"{name}-{n}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError


def stays(file: Path, step: int) -> bool:
    """Whether a rollout file was written before a step's checkpoint; the final measurement comes after it."""
    mode, _, of = file.stem.rpartition("-")
    return int(of) < step if mode == "report" and step else int(of) <= step


def is_end(file: Path) -> bool:
    """Whether a rollout file is of a measurement after training."""
    mode, _, of = file.stem.rpartition("-")
    return mode == "report" and int(of) > 0


def read_metrics(text: str) -> tuple[list[dict[str, Any]], list[int]]:
    """Read the text of a `metrics.jsonl`.

    Returns:
        The lines that hold a step, and the numbers, from 1, of those that are damaged or cut short.
    """
    lines: list[dict[str, Any]] = []
    damaged = []
    for i, each in enumerate(text.split("\n"), 1):
        if not each.strip():
            continue
        try:
            line = json.loads(each)
        except (ValueError, RecursionError):  # a number of too many digits, or too deep
            line = None
        if isinstance(line, dict) and type(line.get("step")) is int and 1 <= line["step"] <= LAST_STEP:
            lines.append(line)
        else:
            damaged.append(i)
    return lines, damaged
