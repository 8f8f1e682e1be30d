"""Kills a server whose parent process has ended, even while the server computes.

A thread of the server could not: code that holds the interpreter's lock stops all of its threads. So this
is a process of its own, run by path with nothing but the standard library: `guard.py PARENT`. The process
that started it is the one that it guards. It ends with that process.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

POLL_S = 0.25
"""Seconds between polls on systems without process descriptors."""


def main() -> None:
    """Wait until the parent or the server has ended, then end the server and this process."""
    server, parent = os.getppid(), int(sys.argv[1])
    try:
        watched = [os.pidfd_open(server), os.pidfd_open(parent)]
    except ProcessLookupError:
        watched = []  # one of them is gone already
    except (AttributeError, OSError):
        while os.getppid() == server and _lives(parent):
            time.sleep(POLL_S)
        watched = []
    if watched:
        # A process's descriptor is readable once the process has ended, even if nobody has asked for its status yet.
        events = select.poll()
        for descriptor in watched:
            events.register(descriptor, select.POLLIN)
        events.poll()
    if os.getppid() == server:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


if __name__ == "__main__":
    main()
