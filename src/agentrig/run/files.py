"""Files that survive a crash of the machine: written under a temporary name, flushed, then renamed."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

NOT_FOR_FOLDERS = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
"""Errors of file systems that cannot flush a folder, such as some network file systems."""


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk.

    Raises:
        OSError: The disk is full or broken.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NOT_FOR_FOLDERS or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """Flush every file and folder below a folder, then the folder itself."""
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            flush(Path(place) / name)
        flush(Path(place))


def sha256_of(file: Path) -> str:
    """Return a file's SHA-256, as `sha256sum` prints it.

    Raises:
        OSError: It cannot be read.
    """
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def put(part: Path, target: Path) -> None:
    """Rename a finished file to its final name, so that a crash leaves either the old or the new content."""
    flush(part)
    os.replace(part, target)
    flush(target.parent)


def write_whole(target: Path, text: str) -> None:
    """Write a file atomically."""
    part = target.with_name(f".{target.name}.part")
    part.write_text(text, "utf-8")
    put(part, target)


def append_line(target: Path, text: str) -> None:
    """Add a line to a file; it is on the disk when this returns."""
    fresh = not target.exists()
    with target.open("a", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    if fresh:
        flush(target.parent)
