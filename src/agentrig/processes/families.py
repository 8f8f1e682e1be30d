"""Finds the processes that a runner's agent started, even detached ones, and ends them with the runner."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection

import psutil

MARK = "AGENTRIG_RUNNER"
"""Environment variable that identifies the runner that started a process."""

ROUNDS = 5
"""How often to search again for processes that were started in the meantime."""


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
    own = os.getpid()
    for _ in range(ROUNDS):
        found = {p.pid: p for p in psutil.process_iter() if _belongs(p, leaders, marks)}
        for leader in leaders:
            with contextlib.suppress(psutil.Error):
                found |= {p.pid: p for p in psutil.Process(leader).children(recursive=True)}
        found.pop(own, None)
        if not found:
            return
        for process in found.values():
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(list(found.values()), timeout=0.2)


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
