"""Worker processes for queries that are not safe in this process; started when first needed."""

from __future__ import annotations

import atexit
import contextlib
import marshal
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

MAX_WORKERS = 32
"""Queries in workers at once; further queries wait, and the wait counts against their time limit."""

KEEP_IDLE = 4
"""Workers kept for the next query."""

GRACE_S = 0.1
"""Seconds after a query's time limit until its worker is killed."""

START_LIMIT_S = 20.0
"""Seconds that a worker may take to start; they don't count against the query's time limit."""

READY = b"ready"
ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH", "LANG", "LC_ALL")
"""Environment variables of a worker: those that Python may need to start, and no keys."""

HEAP = 4
"""The place of `heap_bytes` among the arguments of `worker.run`."""

_SCRIPT = Path(__file__).with_name("worker.py")


class WorkerLost(Exception):
    """The worker died while it ran the query (killed for memory, or SQLite crashed)."""


class WorkersBusy(Exception):
    """The query got no worker, or too late: other queries use all of them, or the machine is too slow to start one."""


class WorkerTimeout(Exception):
    """The query did not end in time; its worker was killed."""


class Worker:
    """One process that runs one query at a time.

    Attributes:
        heap_bytes: What SQLite may allocate in it, from its first query on: SQLite can lower that, but not raise it.
    """

    def __init__(self) -> None:
        self.heap_bytes: int | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
            start_new_session=True,
        )
        self._ready = False

    def wait_until_ready(self, end: float) -> None:
        """Wait until the process has started.

        Raises:
            WorkersBusy: It has not started at `end`, a time of `time.monotonic()`; its start continues.
            OSError: It does not start.
        """
        if self._ready:
            return
        try:
            self._read(len(READY), end)
        except WorkerTimeout:
            raise WorkersBusy(
                f"no worker process started within {START_LIMIT_S:g} s: the machine is too busy. Use fewer runners "
                "(runners.n, runners.threads)"
            ) from None
        except WorkerLost:
            raise OSError(f"no worker process could be started: {sys.executable} {_SCRIPT} does not run") from None
        self._ready = True

    def call(self, request: tuple[Any, ...], wait_s: float) -> Any:
        """Send a request and return the reply.

        Raises:
            WorkerTimeout: No reply within `wait_s` seconds.
            WorkerLost: The process died.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        end = time.monotonic() + wait_s
        data = marshal.dumps(request)
        self.heap_bytes = request[HEAP]
        try:
            self._process.stdin.write(len(data).to_bytes(8, "little") + data)
        except OSError:
            raise WorkerLost from None
        size = int.from_bytes(self._read(8, end), "little")
        return marshal.loads(self._read(size, end))

    def _read(self, size: int, end: float) -> bytes:
        assert self._process.stdout is not None
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        data = bytearray()
        while len(data) < size:
            left = end - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                raise WorkerTimeout
            part = os.read(self._process.stdout.fileno(), min(size - len(data), 1 << 20))
            if not part:
                raise WorkerLost
            data += part
        return bytes(data)

    def end(self) -> None:
        """Kill the process and wait for it."""
        with contextlib.suppress(OSError):
            self._process.kill()
        self._close()
        self._process.wait()

    def disown(self) -> None:
        """Close this process's ends of the pipes; the worker belongs to the parent."""
        self._close()
        self._process.returncode = 0

    def _close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


class Workers:
    """The workers of this process."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._all: set[Worker] = set()
        self._free = threading.BoundedSemaphore(MAX_WORKERS)

    def run(self, request: tuple[Any, ...], *, deadline: float) -> Any:
        """Run one statement in a worker; it is ended at `deadline` (`time.monotonic()`).

        The request is the arguments of `worker.run` less its budget. Waiting for a worker counts too.

        Raises:
            WorkerTimeout: It did not end within its time limit.
            WorkerLost: The worker died.
            WorkersBusy: It got no worker, or so late that less than half of its time was left, which was not enough.
            OSError: No worker can be started.
        """
        asked = time.monotonic()
        if not self._free.acquire(timeout=max(deadline - asked, 0.0)):
            raise WorkersBusy(f"other queries used all {MAX_WORKERS} worker processes for the query's whole budget")
        try:
            late = time.monotonic() - asked > (deadline - asked) / 2
            return self._run(request, deadline, late)
        finally:
            self._free.release()

    def _run(self, request: tuple[Any, ...], deadline: float, late: bool) -> Any:
        with self._lock:
            worker = next((w for w in reversed(self._idle) if w.heap_bytes in (None, request[HEAP])), None)
            if worker is not None:
                self._idle.remove(worker)
        if worker is not None:
            # It may have died while it was idle; a new worker shows whether the query was the cause.
            with contextlib.suppress(WorkerLost, OSError):
                return self._call(worker, request, deadline, late)
        return self._call(self._new(), request, deadline, late)

    def _call(self, worker: Worker, request: tuple[Any, ...], deadline: float, late: bool) -> Any:
        began = time.monotonic()
        try:
            worker.wait_until_ready(began + START_LIMIT_S)
            deadline += time.monotonic() - began
            budget_s = max(deadline - time.monotonic(), 0.0)
            reply = worker.call((*request, budget_s), budget_s + GRACE_S)
        except WorkersBusy:
            self._give(worker)
            raise
        except WorkerTimeout:
            self._drop(worker)
            self._give(self._new())  # starts while the caller continues
            if late:
                raise WorkersBusy(
                    f"other queries used all {MAX_WORKERS} worker processes for most of the query's budget"
                ) from None
            raise
        except BaseException:
            self._drop(worker)
            raise
        self._give(worker)
        if reply[0] == "timeout" and late:
            raise WorkersBusy(f"other queries used all {MAX_WORKERS} worker processes for most of the query's budget")
        return reply

    def _new(self) -> Worker:
        worker = Worker()
        with self._lock:
            self._all.add(worker)
        return worker

    def _give(self, worker: Worker) -> None:
        with self._lock:
            self._idle.append(worker)
            oldest = self._idle.pop(0) if len(self._idle) > KEEP_IDLE else None
        if oldest is not None:
            self._drop(oldest)

    def _drop(self, worker: Worker) -> None:
        with self._lock:
            self._all.discard(worker)
        worker.end()

    def close(self) -> None:
        """End all workers; the next query starts new ones."""
        with self._lock:
            workers, self._all, self._idle = list(self._all), set(), []
        for worker in workers:
            worker.end()

    def forget(self) -> None:
        """In a forked process: drop the workers, which belong to the parent."""
        for worker in self._all:
            worker.disown()
        self._reset()


WORKERS = Workers()
atexit.register(WORKERS.close)
os.register_at_fork(after_in_child=WORKERS.forget)
