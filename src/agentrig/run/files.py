"""Files that outlive a crash of the machine: written aside, flushed to the disk, then renamed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

NOT_FOR_FOLDERS = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
"""What file systems answer that cannot flush a folder: some network ones."""


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


def put(part: Path, target: Path) -> None:
    """Give a finished file its name: afterwards the old content or the new is there, whole, whatever crashes."""
    flush(part)
    os.replace(part, target)
    flush(target.parent)


def write_whole(target: Path, text: str) -> None:
    """Write a file whole or not at all."""
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
