"""Ends a command whose interpreter is held by native code that never returns: nothing inside it could do that."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from multiprocessing.connection import Connection

import psutil

from agentrig.processes.forks import start_process

BEAT_S = 0.5
"""Seconds between two signs of life."""

CONTINUED_S = 2.0
"""Seconds in which a command that was stopped, by Ctrl-Z for example, must give one when it goes on."""


class Watch:
    """A process that kills this one if it gives no sign of life: then no thread and no signal handler of it can run.

    Args:
        why: What is printed then: what happened, and what to do.

    Raises:
        AgentrigError: No process can be started.
    """

    def __init__(self, why: str) -> None:
        context = multiprocessing.get_context("forkserver")
        self._pipe, self._process = start_process(context, watch, os.getpid(), why)
        self._next = 0.0

    def beat(self, limit_s: float | None) -> None:
        """Give a sign of life.

        Args:
            limit_s: Seconds in which the next one must come; None for no limit.
        """
        now = time.monotonic()
        if limit_s is None or now >= self._next:
            self._next = 0.0 if limit_s is None else now + BEAT_S
            with contextlib.suppress(OSError):  # it was killed: nobody watches
                self._pipe.send(limit_s)

    def close(self) -> None:
        """End the watching process."""
        self._pipe.close()
        self._process.kill()  # what the reward has forked may have the pipe too
        self._process.join()


def watch(pipe: Connection, watched: int, why: str) -> None:
    """Run in the watching process: wait for signs of life until the other process ends."""
    limit_s: float | None = None
    with contextlib.suppress(EOFError, OSError, psutil.Error):  # it has ended
        process = psutil.Process(watched)
        while True:
            if not pipe.poll(limit_s) and not pipe.poll(CONTINUED_S):
                if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                    continue
                os.write(2, f"\n{why}\n".encode())
                process.kill()
                return
            limit_s = pipe.recv()
