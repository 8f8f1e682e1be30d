"""File locks held by a process; the kernel releases them when the process ends, for any reason."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import time
import weakref
from pathlib import Path

from agentrig.text import open_own, read_text

log = logging.getLogger(__name__)


class Lock:
    """A lock on a file, held by one process at a time; the file says which process.

    The file is never deleted: without a living holder it does not lock anything.

    Args:
        path: The file; created if it does not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def take(self) -> bool:
        """Acquire the lock without waiting; False if any process holds it, including this one.

        Raises:
            OSError: The file cannot be opened for writing.
        """
        descriptor = open_own(self.path, os.O_RDWR)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # once more: `held` of a page that shows the run has it for an instant
                time.sleep(0.05)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError as error:
            log.warning("%s cannot be locked here (%s): two at once would not be noticed", self.path, error)
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        facts = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps(facts).encode() + b"\n")
        self._descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)
        self._close.atexit = False  # the kernel does it
        _held.add(self)
        return True

    def held(self) -> bool:
        """Return whether any process holds the lock; without leave to read it, whether its last holder lives."""
        if not self.path.is_file():  # nobody can hold what is no file
            return False
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError:
            return not self.holder_died()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # a file system without locks
            return not self.holder_died()
        finally:
            os.close(descriptor)
        return False

    def taken_before(self, file: Path) -> bool:
        """Return whether a file was written after the lock was last taken; False if it is not there."""
        try:
            return os.lstat(file).st_mtime_ns >= os.stat(self.path).st_mtime_ns
        except FileNotFoundError:
            return False

    def holder(self) -> str:
        """Say who holds the lock, for a message."""
        try:
            facts = json.loads(read_text(self.path))
            return f"process {facts['pid']} on {facts['host']}, since {facts['since']}"
        except (OSError, ValueError, KeyError, TypeError):  # it holds the lock, but has not written the file yet
            return "another process"

    def holder_died(self) -> bool:
        """Return whether the process that took the lock is gone; then only a child of it can hold the lock still."""
        try:
            facts = json.loads(read_text(self.path))
            if facts["host"] != socket.gethostname():
                return False
            os.kill(int(facts["pid"]), 0)
        except ProcessLookupError:
            return True
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return False

    def release(self) -> None:
        """Release the lock; does nothing if it is not held."""
        if self._descriptor is not None:
            _held.discard(self)
            with contextlib.suppress(OSError):  # code in this process closed it, and so released it
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
                self._close()
            self._descriptor = None


_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def held_descriptors() -> dict[int, str]:
    """Return the descriptors of the locks that this process holds, each with its file's path."""
    held = [lock for lock in list(_held) if lock._descriptor is not None and lock._close.alive]  # not in a forked child
    return {lock._descriptor: str(lock.path) for lock in held if lock._descriptor is not None}


def _forget_in_child() -> None:
    """Close the parent's locks in a forked child, which would otherwise hold them after the parent ends."""
    for lock in list(_held):
        lock._close()


os.register_at_fork(after_in_child=_forget_in_child)
