"""The checkpoints of a run: each one is saved atomically and has a list of its files."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrig.errors import AgentrigError, CheckpointDamaged, ConfigError
from agentrig.run.files import flush, flush_tree, write_whole

KEPT_CHECKPOINTS = 2
"""How many of the latest checkpoints are kept, in addition to those that the algorithm asked to keep."""

LIST = ".files.json"
"""In each checkpoint: path to size in bytes, of all its other files."""

ASIDE = ("part", "old", "gone")
"""Suffixes of a checkpoint's name while it is written, replaced or removed: `.step-00003.part`."""

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "*.model", "*.tiktoken", "tekken.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
)
"""The files, or patterns of files, of a tokenizer in a Hugging Face directory."""


class Checkpoints:
    """The folder `checkpoints/` of a run directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, in order."""
        return sorted(int(c.name[5:]) for c in self.folder.glob("step-*") if c.name[5:].isdecimal() and c.is_dir())

    def path(self, step: int) -> Path:
        """Return the directory of a step's checkpoint."""
        return self.folder / f"step-{step:05d}"

    def latest(self) -> tuple[Path | None, int]:
        """Return the latest checkpoint and its step, or (None, 0).

        If the checkpoint named by `latest` is gone, this is the newest one; every named checkpoint is complete.
        """
        steps = self.steps()
        with contextlib.suppress(FileNotFoundError):
            named = (self.folder / "latest").read_text("utf-8").strip()
            steps += [s for s in steps if self.path(s).name == named]
        return (self.path(steps[-1]), steps[-1]) if steps else (None, 0)

    def at(self, step: int) -> tuple[Path, int]:
        """Return the checkpoint of a step.

        Raises:
            ConfigError: There is none; the message lists the existing ones.
        """
        if step not in self.steps():
            there = ", ".join(map(str, self.steps())) or "none"
            raise ConfigError(f"{self.folder} has no checkpoint of step {step}; the steps that have one: {there}")
        return self.path(step), step

    def save(self, step: int, write: Callable[[Path], None], *, keep: bool) -> Path:
        """Let `write` fill a checkpoint, make it the latest, and drop old ones."""
        target, part, stale = self.path(step), self._aside(step, "part"), self._aside(step, "old")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        write(part)
        if keep:
            (part / "keep").touch()
        sizes = {str(f.relative_to(part)): f.stat().st_size for f in sorted(part.rglob("*")) if f.is_file()}
        (part / LIST).write_text(json.dumps(sizes, indent=1) + "\n", "utf-8")
        flush_tree(part)
        shutil.rmtree(stale, ignore_errors=True)
        if target.exists():
            os.replace(target, stale)  # a crash must never leave half a checkpoint under a good name
        os.replace(part, target)
        flush(self.folder)
        self._name_latest(step)
        shutil.rmtree(stale, ignore_errors=True)
        others = [s for s in self.steps() if not (self.path(s) / "keep").exists() and s != step]
        for old in others[: -(KEPT_CHECKPOINTS - 1) or None]:
            self._remove(old)
        return target

    def drop_after(self, step: int) -> None:
        """Make the checkpoint of a step the latest and remove those of later steps; 0 removes all."""
        later = [s for s in self.steps() if s > step]
        if step and later:
            self._name_latest(step)
        for s in reversed(later):
            self._remove(s)

    def recover(self) -> None:
        """Clean up after a crash during `save`: keep complete checkpoints, remove incomplete ones."""
        for old in self.folder.glob(".step-*.old"):
            target = self.folder / old.name.removeprefix(".").removesuffix(".old")
            if not target.exists():
                os.replace(old, target)
        for end in ASIDE:
            for left in self.folder.glob(f".step-*.{end}"):
                shutil.rmtree(left)

    def _aside(self, step: int, end: str) -> Path:
        return self.folder / f".step-{step:05d}.{end}"

    def _name_latest(self, step: int) -> None:
        write_whole(self.folder / "latest", self.path(step).name)

    def _remove(self, step: int) -> None:
        gone = self._aside(step, "gone")
        shutil.rmtree(gone, ignore_errors=True)
        os.replace(self.path(step), gone)
        shutil.rmtree(gone)


def verify(checkpoint: Path) -> None:
    """Check that all files of a checkpoint exist and have the right size; reads no weights.

    Raises:
        CheckpointDamaged: A file is missing, or shorter or longer than when it was saved.
    """
    sizes: dict[str, int] = {}
    with contextlib.suppress(FileNotFoundError):  # checkpoints of earlier versions have no list
        try:
            sizes = json.loads((checkpoint / LIST).read_text("utf-8"))
        except ValueError:
            raise CheckpointDamaged(checkpoint, f"its list of files, {LIST}, cannot be read") from None
    for name, size in sizes.items():
        file = checkpoint / name
        if not file.is_file():
            raise CheckpointDamaged(checkpoint, f"{name} is missing")
        if file.stat().st_size != size:
            raise CheckpointDamaged(checkpoint, f"{name} has {file.stat().st_size} bytes; {size} were saved")
    for file in checkpoint.glob("*.safetensors"):
        whole = _safetensors_bytes(file)
        if file.stat().st_size != whole:
            raise CheckpointDamaged(
                checkpoint, f"{file.name} has {file.stat().st_size} bytes; its header says {whole or 'nothing'}"
            )


def _safetensors_bytes(file: Path) -> int:
    """Return the size of a safetensors file according to its header; 0 if the header cannot be read."""
    with file.open("rb") as data:
        length = int.from_bytes(data.read(8), "little")
        if length > file.stat().st_size:
            return 0
        try:
            header = json.loads(data.read(length))
            ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            return 0
    return 8 + length + max(ends, default=0)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy a tokenizer's files as they are: `save_pretrained` writes for some models another pre-tokenizer.

    Args:
        source: A Hugging Face directory.
        target: A checkpoint's directory; files of the same names are replaced.
    """
    if source.resolve() == target.resolve():
        return
    for file in sorted(file for pattern in TOKENIZER_FILES for file in source.glob(pattern) if file.is_file()):
        copy = target / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)


@contextmanager
def reading(checkpoint: Path) -> Iterator[None]:
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
