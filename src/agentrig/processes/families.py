"""Finds the processes that a runner's agent started, even detached ones, and ends them with the runner."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import traceback
from collections.abc import Collection
from typing import NoReturn

import psutil

MARK = "AGENTRIG_RUNNER"
"""Environment variable that identifies the runner that started a process."""

ROUNDS = 8
"""How often to search for processes at most."""

QUIET = 2
"""Searches in a row that must find nothing: one misses a process whose parent ends while it searches."""

_ending = threading.Lock()
"""Held by the thread that ends this process."""


def lead() -> None:
    """Make this process the leader of a new session, so that a terminal's signals do not reach it."""
    with contextlib.suppress(PermissionError):  # it leads one already
        os.setsid()


def end_families(leaders: Collection[int], marks: Collection[str]) -> None:
    """Kill the processes that runners started: descendants, session members, and processes with their marks.

    Args:
        leaders: The runners' process ids; they are killed too, except the calling process.
        marks: Their values of `MARK`.
    """
    own, quiet = os.getpid(), 0
    for _ in range(ROUNDS):
        found = {p.pid: p for p in psutil.process_iter() if _belongs(p, leaders, marks)}
        for leader in leaders:
            with contextlib.suppress(psutil.Error):
                found |= {p.pid: p for p in psutil.Process(leader).children(recursive=True)}
        found.pop(own, None)
        quiet = 0 if found else quiet + 1
        if quiet == QUIET:
            return
        for process in found.values():
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(list(found.values()), timeout=0.2)


def end_stopped(leaders: Collection[int], marks: Collection[str]) -> None:
    """Stop runners, so that they start nothing more while it is searched, and kill them with what they started.

    The process that calls this must live until it returns: if it is killed, the runners stay stopped.
    """
    try:
        for leader in leaders:
            with contextlib.suppress(ProcessLookupError):
                os.kill(leader, signal.SIGSTOP)
        end_families(leaders, marks)
    except BaseException:
        for leader in leaders:
            with contextlib.suppress(ProcessLookupError):
                os.kill(leader, signal.SIGKILL)
        raise


def end_own_family(marks: Collection[str]) -> NoReturn:
    """End this process and those that it started, whatever its threads still start meanwhile.

    A forked process does it: it stops this one first, so that nothing more is started while it searches. There is one
    such process only, whichever threads call this: two would find and kill each other, and leave this one stopped.
    """
    if not _ending.acquire(blocking=False):
        threading.Event().wait()  # another thread ends this process
    leader = os.getpid()
    try:
        forked = os.fork()
    except OSError:  # no process can be started: nor can the agent start any
        end_families([leader], marks)
        os._exit(0)
    if forked == 0:
        try:
            end_stopped([leader], marks)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    threading.Event().wait()  # until it is killed
    os._exit(0)


def marked(name: str, value: str) -> list[psutil.Process]:
    """Return the processes of this user that were started with an environment variable of that value."""
    return [p for p in psutil.process_iter() if _variable(p, name) == value]


def _belongs(process: psutil.Process, leaders: Collection[int], marks: Collection[str]) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return os.getsid(process.pid) in leaders or _variable(process, MARK) in marks
    except (psutil.Error, OSError):
        return False


def _variable(process: psutil.Process, name: str) -> str | None:
    try:
        if process.uids().real != os.getuid():
            return None
        value: str | None = process.environ().get(name)
        return value
    except (psutil.Error, OSError):  # another user's process, or it has ended
        return None
