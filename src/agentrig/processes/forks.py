"""Forks processes from a clean server: no modules from the current folder, no signals from the terminal."""

from __future__ import annotations

import atexit
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import process, resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from agentrig.errors import AgentrigError
from agentrig.processes.confine import environment, start_forkserver
from agentrig.processes.ends import SIGNALS, end_now, wake_stopped

TRIES = 3
"""How often to try to start a process when the server that forks it has died."""

SAFE_PATH_KEPT = "AGENTRIG_KEEP_SAFEPATH"
"""Set if the user has set PYTHONSAFEPATH; runners then keep it."""

NO_MAIN_GUARD = 87
"""Exit code of a process that would start others while it imports the script that started the run."""

_lock = threading.Lock()

atexit.register(wake_stopped)  # here: a command that starts no process has nothing to wake


def start_process(
    context: Any, target: Callable[..., None], *arguments: Any, name: str | None = None
) -> tuple[Connection, Any]:
    """Fork a daemon process that runs `target(pipe, *arguments)`; return this end of its pipe, and the process."""
    reason = ""
    for _ in range(TRIES):
        ours, theirs = context.Pipe()
        started = context.Process(target=target, args=(theirs, *arguments), name=name, daemon=True)
        try:
            start_server()
            started.start()
        except (EOFError, OSError) as error:  # the server died, or dies just now
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            ours.close()
            time.sleep(0.2)
        else:
            return ours, started
        finally:
            theirs.close()
    folder = tempfile.gettempdir()
    if not os.path.isdir(folder):
        raise AgentrigError(
            f"no runner can be started: the run's temporary folder {folder} is gone; does the agent remove it? Let it "
            "remove only files of its own"
        )
    raise AgentrigError(
        f"no runner can be started: the process that they are forked from died {TRIES} times in a row ({reason}). "
        "Was it killed, or is the memory or the number of processes or open files at its limit?"
    )


def end_if_importing() -> None:
    """End this process if it is a runner that imports the script that started the run: it would start one again."""
    if getattr(process.current_process(), "_inheriting", False):
        end_now(NO_MAIN_GUARD)  # in a command, `os._exit` raises
        os._exit(NO_MAIN_GUARD)


def start_server() -> None:
    """Start the process that others are forked from, unless it runs; do not wait while it imports what they share."""
    end_if_importing()
    with _started_clean():
        with _signals_blocked():  # it ignores Ctrl-C and SIGTERM by itself, but not a terminal that is closed
            resource_tracker.ensure_running()
        with _signals_blocked():
            start_forkserver()


@contextmanager
def _started_clean() -> Iterator[None]:
    """Keep the current folder out of `sys.path` of Python processes started in this block, as `python -P` does."""
    with _lock:
        kept = {SAFE_PATH_KEPT: "1"} if os.environ.get("PYTHONSAFEPATH") else {}
        with environment({"PYTHONSAFEPATH": "1", **kept}):
            yield


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block the ending signals in this thread; processes started in this block inherit that until they unblock.

    The terminal and Slurm send their signals to all processes of a run; the run itself ends the others.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
