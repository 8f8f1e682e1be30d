"""The checkpoints of a run: each is saved atomically, with a digest of every file, and refused if one has changed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs

from agentrig.errors import AgentrigError, CheckpointDamaged, ConfigError, RunFileError
from agentrig.run.damage import CURES, entries, read_object, writing
from agentrig.run.damage import reading as reading_file
from agentrig.run.files import flush, flush_tree, flushing, write_whole
from agentrig.text import check_regular, read_fault, read_text

KEPT_CHECKPOINTS = 2
"""How many of the latest checkpoints are kept, in addition to those that the algorithm asked to keep."""

LIST = ".files.json"
"""In each checkpoint: path to size in bytes and digest, of all its other files."""

RUN_ID = ".run"
"""In each checkpoint: the `id` in the `manifest.json` of the run that saved it."""

SAVED = "checkpoints"
"""The key of `progress.json` with the digests of the lists that were saved, by step."""

STARTING_MODEL = "starting_model.json"
"""In a checkpoint of adapters: `algorithm`, which can merge them (`AlgorithmSpec.export`), and the name and the digest
of the `model` that they belong to."""

PIECE = 16 << 20
"""Bytes of a file that one thread digests."""

ASIDE = ("part", "old", "gone")
"""Suffixes of a checkpoint's name while it is written, replaced or removed: `.step-00003.part`."""

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "*.model", "*.tiktoken", "tekken.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
)
"""The files, or patterns of files, of a tokenizer in a Hugging Face directory."""

STATE = Path("trainer") / "state.json"
"""What the loop adds to the learner's checkpoint."""


@attrs.define
class Best:
    """The weights that did best in validation so far: by accuracy, among equals by mean reward.

    Attributes:
        step: The step that made them.
        accuracy: None before the first validation.
        kept: Whether the learner has a copy of them.
    """

    step: int = 0
    accuracy: float | None = None
    reward: float | None = None
    kept: bool = False


def write_state(directory: Path, *, step: int, weights_of: int, seed: int, best: Best) -> None:
    """Write what the loop needs to go on from a checkpoint."""
    state = {"step": step, "weights_of": weights_of, "seed": seed, "best": attrs.asdict(best)}
    (directory / STATE).write_text(json.dumps(state) + "\n", "utf-8")


def read_state(checkpoint: Path) -> tuple[int, Best]:
    """Return the step that made a checkpoint's weights, and the best weights so far."""
    try:
        state = json.loads(read_text(checkpoint / STATE))
        return state["weights_of"], Best(**state["best"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"{checkpoint / STATE} cannot be read ({type(error).__name__}: {error})"
        raise CheckpointDamaged(checkpoint, what) from None


class Checkpoints:
    """The folder `checkpoints/` of a run directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, in order."""
        with reading_file(self.folder):
            found = [c for c in entries(self.folder) if c.name.startswith("step-") and c.is_dir()]
        return sorted(int(c.name[5:]) for c in found if c.name[5:].isdecimal())

    def path(self, step: int) -> Path:
        """Return the directory of a step's checkpoint."""
        return self.folder / f"step-{step:05d}"

    def latest(self) -> tuple[Path | None, int]:
        """Return the latest checkpoint and its step, or (None, 0); each that has its name is complete."""
        steps = self.steps()
        return (self.path(steps[-1]), steps[-1]) if steps else (None, 0)

    def named_latest(self) -> str | None:
        """Return what the file `latest` holds; None without one. Nothing here goes by it: see `latest`."""
        file = self.folder / "latest"
        if not os.path.lexists(file):
            return None
        if file.is_symlink():
            return os.readlink(file)
        try:
            check_regular(file)
            return read_text(file).strip()
        except (OSError, ValueError) as error:
            return read_fault(error)

    def at(self, step: int) -> tuple[Path, int]:
        """Return the checkpoint of a step."""
        if step not in self.steps():
            there = ", ".join(map(str, self.steps())) or "none"
            raise ConfigError(f"{self.folder} has no checkpoint of step {step}; the steps that have one: {there}")
        return self.path(step), step

    def save(
        self,
        step: int,
        write: Callable[[Path], None],
        *,
        keep: bool,
        run_id: str = "",
        record: Callable[[str], None] = lambda _: None,
    ) -> Path:
        """Let `write` fill a checkpoint, make it the latest, and drop old ones.

        Args:
            write: Writes the files into the folder that it gets.
            keep: Whether it stays when later ones are saved.
            run_id: The run that saves it; see `RUN_ID`.
            record: Writes down the digest of the list of its files, before the checkpoint gets its name.

        Raises:
            RunFileError: The disk is full, or a file cannot be written.
        """
        target, part, stale = self.path(step), self._aside(step, "part"), self._aside(step, "old")
        try:
            with writing(target):
                _remove(part)
                self._make_room(step)
                part.mkdir(parents=True)
                with flushing(part):
                    write(part)
                if run_id:
                    (part / RUN_ID).write_text(run_id + "\n", "utf-8")
                write_list(part)
                if keep:
                    (part / "keep").touch()  # not in the list: a user may add or remove it
                flush_tree(part)
                record(digest_of(part / LIST))
                _remove(stale)
                if os.path.lexists(target):
                    os.replace(target, stale)  # a crash must never leave half a checkpoint under a good name
                os.replace(part, target)
                flush(self.folder)
                self._name_latest(step)
                _remove(stale)
                self._drop_old(step, KEPT_CHECKPOINTS)
        except BaseException:  # on a full disk the run could not write how it ended
            with suppress(OSError, RunFileError):
                self.recover()
                self.remove_incomplete()
            raise
        return target

    def _make_room(self, step: int) -> None:
        """Where the disk has no room for one more checkpoint like the latest, keep only that one."""
        latest, _ = self.latest()
        if latest is not None:
            size = sum(file.stat().st_size for file in saved_files(latest))
            if size > shutil.disk_usage(self.folder).free:
                self._drop_old(step, 1)

    def _drop_old(self, step: int, number: int) -> None:
        """Drop all but so many of the latest checkpoints, and those that are kept."""
        for old in self.steps()[:-number]:
            if old != step and not (self.path(old) / "keep").exists():
                self._remove(old)

    def drop_after(self, step: int) -> None:
        """Remove the checkpoints of later steps, the last one first, so that the latest is right at any time."""
        for s in reversed(self.steps()):
            if s > step:
                self._remove(s)
        if step:
            self._name_latest(step)

    def recover(self) -> None:
        """Give a complete checkpoint its name, where a crash came between the two renames of `save`."""
        for old in self.folder.glob(".step-*.old"):
            target = self.folder / old.name.removeprefix(".").removesuffix(".old")
            if not os.path.lexists(target):
                with writing(target):
                    os.replace(old, target)

    def remove_incomplete(self) -> None:
        """Remove what a crash during `save` has left."""
        for end in ASIDE:
            for left in self.folder.glob(f".step-*.{end}"):
                _remove(left)

    def _aside(self, step: int, end: str) -> Path:
        return self.folder / f".step-{step:05d}.{end}"

    def _name_latest(self, step: int) -> None:
        """Write the name of the latest checkpoint, for readers without this class."""
        with writing(self.folder / "latest"):
            write_whole(self.folder / "latest", self.path(step).name)

    def _remove(self, step: int) -> None:
        gone = self._aside(step, "gone")
        _remove(gone)
        os.replace(self.path(step), gone)
        _remove(gone)


def _remove(path: Path) -> None:
    """Remove a folder, a file or a link, but not what a link points to; do nothing if there is none."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


@contextmanager
def told_if_removed(checkpoint: Path | None) -> Iterator[None]:
    """Say so where a block fails because a checkpoint has gone: a run that goes on removes its older ones.

    Raises:
        AgentrigError: It has gone since the command began; the message says what to do.
    """
    try:
        yield
    except Exception as error:
        run = checkpoint.absolute().parents[1] if checkpoint is not None else None
        if run is None or checkpoint is None or checkpoint.is_dir() or not (run / "config.toml").is_file():
            raise
        raise AgentrigError(
            f"{checkpoint} was removed meanwhile: a run that goes on keeps only its last {KEPT_CHECKPOINTS} "
            f"checkpoints. Repeat the command with the run, {run}: it takes the latest. A run with "
            "algorithm.keep_every=N keeps every N-th one for good"
        ) from error


def saved_files(folder: Path) -> list[Path]:
    """Return the files of a checkpoint, in order: without those whose name, or whose folder's name, begins with `.`."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return [file for file in files if not any(part.startswith(".") for part in file.relative_to(folder).parts)]


def write_list(folder: Path) -> None:
    """Write the list of a folder's files, for `verify`."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    listed = {str(file.relative_to(folder)): [file.stat().st_size, digest_of(file)] for file in files}
    (folder / LIST).write_text(json.dumps(listed, indent=1) + "\n", "utf-8")


def digest_of(file: Path) -> str:
    """Return a file's digest: BLAKE2b of the digests of its pieces, 32 hexadecimal characters."""

    def piece(start: int) -> bytes:
        with file.open("rb") as data:
            data.seek(start)
            return hashlib.blake2b(data.read(PIECE), digest_size=16).digest()

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashlib lets other threads run meanwhile
        pieces = pool.map(piece, range(0, file.stat().st_size, PIECE))
        return hashlib.blake2b(b"".join(pieces), digest_size=16).hexdigest()


def verify(checkpoint: Path, *, trains: bool = True, digests: bool = True) -> None:
    """Check that a checkpoint is what the run saved: every file by size and digest, and the list of them.

    The digest of that list is in the `progress.json` of the run. A directory that is no checkpoint of a run has no
    list; then nothing is checked.

    Args:
        trains: Whether training goes on from it; without it the files of `trainer/` are not needed.
        digests: Whether the content of its files is read; without it only that of the list is.

    Raises:
        CheckpointDamaged: A file is missing, was added, or has changed since the checkpoint was saved.
        RunFileError: The run's `progress.json` is damaged, or something may not be read.
    """
    checkpoint = checkpoint.absolute()
    with reading_file(checkpoint):
        _verify(checkpoint, trains, digests)


def _verify(checkpoint: Path, trains: bool, digests: bool) -> None:
    run, file = checkpoint.parent.parent, checkpoint / LIST
    ours = checkpoint.parent.name == "checkpoints" and (run / "config.toml").is_file()
    progress = read_object(run / "progress.json") if ours else {}
    if os.path.lexists(file):
        listed = _listed(checkpoint)
        wanted = {name: saved for name, saved in listed.items() if trains or not name.startswith("trainer/")}
        _refuse_faults(checkpoint, wanted, digests=False)
        for name in (str(file.relative_to(checkpoint)) for file in saved_files(checkpoint)):
            if name not in listed and name != "keep" and (trains or not name.startswith("trainer/")):
                raise CheckpointDamaged(checkpoint, f"{name} was not there when it was saved; move it away")
        if digests:
            _refuse_faults(checkpoint, wanted, digests=True)
    elif ours:
        raise CheckpointDamaged(checkpoint, f"its list of files, {LIST}, is missing")
    saved = saved_digests(run, progress)
    if progress and not saved:
        raise _no_digests(run)
    digest = digest_of(file) if progress else ""
    if progress and digest not in saved.get(checkpoint.name, ()):
        if other := next((name for name, digests in saved.items() if digest in digests), ""):
            raise CheckpointDamaged(
                checkpoint,
                f"it is what the run saved as {other} (progress.json): give the folders their names again",
                exchanged=True,
            )
        raise CheckpointDamaged(
            checkpoint,
            f"{LIST} is not the one that the run wrote for it (progress.json): it was changed or copied there",
            unlike="progress.json",
        )
    with suppress(RunFileError):  # a damaged manifest says nothing of the checkpoint
        own, known = run_id_of(checkpoint), read_object(run / "manifest.json").get("id") if ours else None
        if known and own not in ("", known):
            raise CheckpointDamaged(
                checkpoint,
                f"another run saved it: {RUN_ID} has the id {own}, and manifest.json has {known}",
                unlike="manifest.json",
            )


def run_id_of(checkpoint: Path) -> str:
    """Return the id of the run that saved a checkpoint; '' if it has none."""
    return read_text(checkpoint / RUN_ID).strip() if (checkpoint / RUN_ID).is_file() else ""


def _listed(checkpoint: Path) -> dict[str, tuple[int, str]]:
    """Return what a checkpoint's list says of its files: path to size in bytes and digest."""
    try:
        listed: dict[str, Sequence[Any]] = json.loads(read_text(checkpoint / LIST))
        return {str(name): (int(size), str(digest)) for name, (size, digest) in listed.items()}
    except PermissionError:
        raise
    except (ValueError, TypeError, AttributeError, OSError):
        raise CheckpointDamaged(checkpoint, f"its list of files, {LIST}, cannot be read") from None


def check_sizes(checkpoint: Path) -> None:
    """Check that the files of a checkpoint are there, with the sizes that its list has; their content is not read."""
    with reading_file(checkpoint):
        _refuse_faults(checkpoint, _listed(checkpoint), digests=False)


def damaged_state(checkpoint: Path) -> list[str]:
    """Return the files of `trainer/` that are not as they were saved; none of a directory that has no list of files.

    Only training needs them: the model in the other files may be whole (`verify` with `trains=False`).
    """
    with reading_file(checkpoint):
        listed = _listed(checkpoint) if os.path.lexists(checkpoint / LIST) else {}
        state = {name: wanted for name, wanted in listed.items() if name.startswith("trainer/")}
        return [name for name, wanted in state.items() if _fault(checkpoint / name, *wanted)]


def _fault(file: Path, size: int, digest: str | None) -> str:
    """Return how a file is not what was saved, after its name; '' if it is. For no `digest` its content is not read."""
    if not file.is_file():
        return "is no file" if os.path.lexists(file) else "is missing"
    if file.stat().st_size != size:
        return f"has {file.stat().st_size} bytes; {size} were saved"
    try:
        changed = digest is not None and digest_of(file) != digest
    except PermissionError:
        raise
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return "has changed since it was saved (its digest differs)" if changed else ""


def _refuse_faults(checkpoint: Path, wanted: Mapping[str, tuple[int, str]], *, digests: bool) -> None:
    for name, (size, digest) in wanted.items():
        if fault := _fault(checkpoint / name, size, digest if digests else None):
            raise CheckpointDamaged(checkpoint, f"{name} {fault}")


def saved_digests(run: Path, progress: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the digests that `progress.json` holds of lists of files, by the checkpoint's name."""
    found = progress.get(SAVED, {})
    if not isinstance(found, dict) or not all(isinstance(digests, list) for digests in found.values()):
        raise _no_digests(run)
    return found


def listed_digests(checkpoints: Iterable[Path]) -> dict[str, list[str]]:
    """Return what `saved_digests` does, of checkpoints as they are: for a run whose `progress.json` is lost."""
    return {at.name: [digest_of(at / LIST)] for at in checkpoints if (at / LIST).is_file()}


def _no_digests(run: Path) -> RunFileError:
    file = run / "progress.json"
    return RunFileError(f"{file} is damaged: {SAVED} does not hold the digests of checkpoints. {CURES[file.name]}")


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy a tokenizer's files as they are: `save_pretrained` writes for some models another pre-tokenizer.

    Args:
        target: A checkpoint's directory; files of the same names are replaced.
    """
    if source.resolve() == target.resolve():
        return
    for file in sorted(file for pattern in TOKENIZER_FILES for file in source.glob(pattern) if file.is_file()):
        copy = target / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)


@contextmanager
def loading(checkpoint: Path) -> Iterator[None]:
    """Turn exceptions while an algorithm reads a checkpoint into errors that name the checkpoint.

    Raises:
        CheckpointDamaged: Replaces the block's exception, unless that is an `AgentrigError`.
    """
    try:
        yield
    except AgentrigError:
        raise
    except Exception as error:
        raise CheckpointDamaged(checkpoint, f"{type(error).__name__}: {error}") from error
