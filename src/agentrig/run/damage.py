"""Errors of the files of a run directory: the message says which file, what is wrong, and what to do."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrig.errors import AgentrigError, RunFileError, exhausted
from agentrig.text import check_regular, json_kind, read_fault

FULL = 1 << 16
"""A disk with fewer free bytes counts as full; libraries that write weights do not always report it."""

CURES: Mapping[str, str] = {
    "manifest.json": "Restore it from a copy, or remove it: only the record of versions and data is lost",
    "summary.json": "Remove it: the run writes it again when it ends",
    "progress.json": "Restore it from a copy, or remove it: the accuracy measured before training is then lost",
    "error.json": "Remove it: it only says how the run ended",
    "config.toml": "Restore it from a copy, for example from the section config of manifest.json",
}
"""What to do about a damaged file, by its name."""


@contextmanager
def writing(path: Path, setting: str = "run.directory=DIR") -> Iterator[None]:
    """Turn errors while a file or folder is written into clear messages.

    Args:
        setting: What names another place; inside a run that exists already there is none, unless it is an option.

    Raises:
        RunFileError: Replaces an `OSError`, and any exception of a library on a full disk.
    """
    try:
        yield
    except AgentrigError:
        raise
    except Exception as error:
        if not getattr(error, "errno", None) and _is_full(path):
            error = OSError(errno.ENOSPC, str(error))
        wrong = exhausted(error)
        if not isinstance(error, OSError) and not wrong:
            raise
        if setting == "run.directory=DIR" and any((folder / "config.toml").is_file() for folder in path.parents[:3]):
            setting = ""
        raise RunFileError(f"{path} cannot be written: {wrong or _wrong(error, path, setting)}") from error


def _wrong(error: Exception, path: Path, setting: str) -> str:
    code = error.errno if isinstance(error, OSError) else None
    what = (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        locked = ", or undo chattr +i" if code == errno.EPERM else ""
        return f"{what}. Get write permission there{locked}{f', or choose another place: {setting}' if setting else ''}"
    gone = next((folder for folder in reversed(path.parents) if not os.path.lexists(folder)), None)
    if code == errno.ENOENT and gone is not None and setting in ("", "run.directory=DIR"):
        return (
            f"{what}. The folder {gone} is gone: something has removed it since the run started, for example an agent "
            "that cleans up. Find out what, and start the run again"
        )
    if code in (errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENOENT, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL):
        cure = f"choose another place with {setting}" if setting else "move away what is there under a wrong name"
        return f"{what}. It can't be created there: {cure}"
    return f"{what}. Check the disk (dmesg, df); everything written before is intact"


def _is_full(path: Path) -> bool:
    for place in (path, *path.parents):
        try:
            return shutil.disk_usage(place).free < FULL
        except OSError:
            continue
    return False


NOT_ALLOWED = "Nothing is damaged: get permission to read it"
"""What to do about a file or folder that may not be read."""


@contextmanager
def reading(path: Path, cure: str = "") -> Iterator[None]:
    """Turn errors while a file of a run is read into clear messages; `FileNotFoundError` is left to the caller.

    Args:
        cure: What to do; by default the entry of `CURES` for its name.

    Raises:
        RunFileError: Replaces the block's exception.
    """
    try:
        check_regular(path)
        yield
    except (AgentrigError, FileNotFoundError):
        raise
    except Exception as error:
        verb, cure = "is damaged", cure or CURES.get(path.name, "Remove it, or restore it from a copy")
        if isinstance(error, OSError):
            verb = "cannot be read"
            if isinstance(error, PermissionError):
                path, cure = error.filename or path, NOT_ALLOWED
        raise RunFileError(f"{path} {verb}: {read_fault(error)}. {cure}") from error


def entries(folder: Path) -> list[Path]:
    """Return what is in a folder of a run, by name; nothing if there is no such folder."""
    with reading(folder):
        try:
            return sorted(folder.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []


def read_object(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds; an empty one when the file is not there."""
    with reading(path):
        try:
            text = path.read_text("utf-8")
        except FileNotFoundError:
            return {}
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError(f"it holds {json_kind(value)}, not an object")
        return value
