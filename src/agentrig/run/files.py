"""Files that survive a crash of the machine: written under a temporary name, flushed, then renamed."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from agentrig.text import open_own

NOT_FOR_FOLDERS = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
"""Errors of file systems that cannot flush a folder, such as some network file systems."""

FLUSHED_S = 0.25
"""Seconds between two flushes of a file that grows: some 100 MB on a usual disk."""


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
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


@contextmanager
def flushing(folder: Path) -> Iterator[None]:
    """While this is entered, flush the files of a folder as they grow.

    So their last flush is short. It would also hold up everybody who flushes another file of the same disk, however
    small: with checkpoints of 21.6 GB, the steps of a run took up to twice as long beside it.
    """
    over, failed = threading.Event(), []

    def flush_all() -> None:
        while not over.wait(FLUSHED_S):
            try:
                for place, _, names in os.walk(folder):
                    for name in names:
                        with suppress(FileNotFoundError):  # it was renamed
                            flush(Path(place) / name)
            except OSError as error:  # the system says it once
                failed.append(error)
                return

    thread = threading.Thread(target=flush_all, name="flushing a checkpoint", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if failed:
        raise failed[0]


def sha256_of(file: Path) -> str:
    """Return a file's SHA-256, as `sha256sum` prints it."""
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


@contextmanager
def replacing(target: Path, part: Path) -> Iterator[Path]:
    """Put the file that the block writes in the place of another one; if the block fails, nothing is left of it.

    It gets its final name once it is on the disk: a crash leaves either the old or the new content.

    Args:
        part: The name until then, in the same folder.
    """
    try:
        part.unlink(missing_ok=True)  # a crash may have left it; and a link would lead elsewhere
        yield part
        flush(part)
        os.replace(part, target)
        flush(target.parent)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def write_whole(target: Path, text: str) -> None:
    """Write a file atomically."""
    with replacing(target, target.with_name(f".{target.name}.part")) as part:
        part.write_text(text, "utf-8")


def append_line(target: Path, text: str) -> None:
    """Add a line to a file, whole or not at all; it is on the disk when this returns."""
    fresh, line = not target.exists(), f"{text}\n".encode()
    with open(open_own(target, os.O_WRONLY | os.O_APPEND), "ab", buffering=0) as file:
        before = os.fstat(file.fileno()).st_size
        try:
            while line := line[file.write(line) :]:
                pass
            os.fsync(file.fileno())
        except OSError:
            file.truncate(before)
            raise
    if fresh:
        flush(target.parent)
