"""Checks a model directory's files before they are read: regular files, inside the directory, complete."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from agentrig.errors import AgentrigError

INDEX = "model.safetensors.index.json"
KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}


class ModelError(AgentrigError):
    """A model's directory is missing, unreadable or damaged; names the file."""


def model_files(directory: str | Path, needed: str) -> Path:
    """Check a Hugging Face directory and return it.

    Links are followed, so a folder of the Hugging Face cache works too.

    Args:
        needed: A file that must be there.

    Raises:
        ModelError: It is missing or cannot be read, lacks the file, or holds a FIFO, socket or device, whose
            read might never end.
    """
    directory = Path(directory).expanduser()
    try:
        entries = sorted(directory.iterdir())
        for entry in entries:
            if entry.exists() and not (entry.is_file() or entry.is_dir()):
                raise ModelError(_odd(entry))
        if not (directory / needed).is_file():
            raise ModelError(f"{directory} is not a Hugging Face model directory: it has no {needed}")
        _readable(directory / needed)
    except FileNotFoundError:
        raise ModelError(f"{directory} is not a Hugging Face model directory: there is no such directory") from None
    except NotADirectoryError:
        raise ModelError(f"{directory} is not a Hugging Face model directory: it is a file") from None
    except PermissionError as error:
        raise ModelError(_forbidden(Path(error.filename or directory))) from None
    return directory


def weight_files(directory: Path) -> list[Path]:
    """Return a directory's one safetensors file, or its shards, each checked against the length in its header.

    Raises:
        ModelError: There is none; one is missing, unreadable, damaged or no regular file; or the index names one
            outside the directory.
    """
    index = directory / INDEX
    files = [directory / "model.safetensors"]
    if index.is_file():
        files = [_inside(directory, name) for name in _shards(index)]
    elif not files[0].exists():
        raise ModelError(
            f"{directory} holds no model.safetensors; write one with transformers: "
            "AutoModelForCausalLM.from_pretrained(…).save_pretrained(…)"
        )
    for file in files:
        _whole(file)
    return files


def stored_in(directory: Path, dtype: str) -> bool:
    """Return whether all weights in a directory's safetensors files have a dtype, by safetensors' name: `BF16`."""
    from safetensors import safe_open

    files = sorted(directory.glob("*.safetensors"))
    for path in files:
        with safe_open(str(path), framework="np") as file:
            if any(file.get_slice(name).get_dtype() != dtype for name in file.keys()):  # noqa: SIM118  (no mapping)
                return False
    return bool(files)


@contextmanager
def loading(directory: Path, what: str) -> Iterator[None]:
    """Turn what a library raises while it loads a part of a model into a `ModelError`."""
    try:
        yield
    except AgentrigError:
        raise
    except Exception as error:
        cure = getattr(error, "cure", "a file there is damaged or does not fit the others; copy the model again")
        raise ModelError(
            f"the {what} in {directory} cannot be loaded: {type(error).__name__}: {error}\n  {cure}"
        ) from error


def _shards(index: Path) -> list[str]:
    _readable(index)
    try:
        shards = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
        if not shards or not all(isinstance(name, str) for name in shards):
            raise ValueError("weight_map must map names to files")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{index} is damaged ({type(error).__name__}: {error}); copy the model again") from None
    return sorted(shards)


def _inside(directory: Path, name: str) -> Path:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ModelError(
            f"{directory / INDEX} names {name!r}, which lies outside the model's directory; such an index is refused"
        )
    return directory / name


def _whole(file: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise ModelError(_odd(file))
        _readable(file)
        with safe_open(str(file), framework="np"):
            pass  # it compares the header with the file's length
    except FileNotFoundError:
        raise ModelError(f"{file} is missing; copy the model again, with all of its files") from None
    except PermissionError:
        raise ModelError(_forbidden(file)) from None
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is damaged or cut off ({error}); copy it again") from None


def _readable(file: Path) -> None:
    if not os.access(file, os.R_OK):
        raise ModelError(_forbidden(file))


def _forbidden(path: Path) -> str:
    return f"{path} may not be read by this user (uid {os.getuid()}); change its permissions: chmod -R u+rX {path}"


def _odd(file: Path) -> str:
    kind = KINDS.get(stat.S_IFMT(file.stat().st_mode), "no regular file")
    return f"{file} is {kind}; a model's directory must hold regular files, or links to them"
