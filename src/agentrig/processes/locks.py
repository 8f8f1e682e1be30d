"""Locks that a process holds on a file; the kernel takes them back when it ends, however it ends."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import time
import weakref
from pathlib import Path

log = logging.getLogger(__name__)


class Lock:
    """A lock on a file, held by one process at a time, that says who holds it.

    The file stays where it is: a file without a living holder is no lock.

    Args:
        path: The file; made when it is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def take(self) -> bool:
        """Take the lock, without waiting; False when somebody has it, this process included.

        Raises:
            OSError: The file cannot be opened for writing.
        """
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
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

    def holder(self) -> str:
        """Say who holds the lock, for a message."""
        try:
            facts = json.loads(self.path.read_text("utf-8"))
            return f"process {facts['pid']} on {facts['host']}, since {facts['since']}"
        except (OSError, ValueError, KeyError, TypeError):  # it has it, and has not written its name yet
            return "another process"

    def release(self) -> None:
        """Let go of the lock; harmless when it is not held."""
        if self._descriptor is not None:
            _held.discard(self)
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self._close()
            self._descriptor = None


_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def _forget_in_child() -> None:
    """Close the locks of the parent in a forked child: it would hold them after the parent's end."""
    for lock in list(_held):
        lock._close()


os.register_at_fork(after_in_child=_forget_in_child)
