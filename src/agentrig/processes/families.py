"""Ends the processes that a runner's agent started, even detached ones, with the runner."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from multiprocessing import forkserver, resource_tracker
from typing import NoReturn

import psutil

from agentrig.processes.put_back import MARK as MARK
from agentrig.processes.supervisor import adopt_orphans as adopt_orphans
from agentrig.processes.supervisor import end_descendants, end_with_parent

ROUNDS = 8
"""How often to search for processes at most."""

PRINTED = 256_000
"""Bytes that a runner may write to stdout, and to stderr, in a minute: more would fill the terminal and the disk."""

QUIET = 2
"""Searches in a row that must find nothing: one misses a process whose parent ends while it searches."""


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


def guard(who: str, after_run: Callable[[], None] = lambda: None) -> None:
    """Fork, and return in the forked process: a runner. This one guards it, and ends when the runner has ended.

    The guard adopts every descendant of the runner whose parent ends, whatever its session and its variables are. It
    kills all of them as soon as the runner has ended, the run's process has, or the pool asks for the end by SIGTERM.
    The runner could not do that itself: it could be killed, and to wait for adopted processes is to take the exit codes
    of the agent's own. A guard that is killed takes the runner with it.

    What the runner prints goes through the guard too, at most `PRINTED` bytes in a minute.

    Args:
        who: Whose code the runner runs, for messages: `agent`, or `reward`.
        after_run: Called by the guard if the run's process has ended.
    """
    lead()
    _leave_helpers()
    adopts = sys.platform == "linux"
    if adopts:
        adopt_orphans()
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    printed = {os.pipe(): number for number in (1, 2)}
    guarding = os.getpid()
    runner = os.fork()
    if runner == 0:
        os.close(woken)
        os.close(wakes)
        for (source, into), number in printed.items():
            os.dup2(into, number)
            os.close(source)
            os.close(into)
        lead()
        if adopts:
            end_with_parent(guarding)
        return
    asked = False

    def ask(*_: object) -> None:
        nonlocal asked
        asked = True

    def ask_if_run(of: int | None) -> None:
        while signal.sigwaitinfo([signal.SIGTERM]).si_pid != of:
            pass  # a scheduler sends it to all processes, and the run still ends its step
        ask()
        os.write(wakes, b"\0")

    run = multiprocessing.parent_process()
    assert run is not None
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGCHLD,))
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
        threading.Thread(target=ask_if_run, args=(run.pid,), name="asked", daemon=True).start()
    else:
        signal.signal(signal.SIGTERM, ask)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
    for _, into in printed:
        os.close(into)
    output = _Output(f"the {who} in process {runner}", {source: number for (source, _), number in printed.items()})
    status: dict[int, int] = {}
    while runner not in status and not asked and not multiprocessing.connection.wait([run.sentinel], 0):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == runner:
                status[runner] = ended[1]
                break
        else:
            ready = multiprocessing.connection.wait([woken, run.sentinel, *output.sources])
            if woken in ready:
                os.read(woken, 4096)
            for source in output.sources.keys() & ready:
                output.forward(source)
    if adopts:
        end_descendants(lambda pid, code, used: status.setdefault(pid, code))
    else:
        end_families([runner], [os.environ.get(MARK, "")])
    while ready := multiprocessing.connection.wait(list(output.sources), 0):  # the last words
        for source in output.sources.keys() & ready:
            output.forward(source)
    if multiprocessing.connection.wait([run.sentinel], 0):
        after_run()
    _leave_as(status.get(runner, 0))


def _leave_helpers() -> None:
    """Close the pipes to multiprocessing's own processes: one that reads an agent's bytes dies with a traceback."""
    for helper, name in ((forkserver._forkserver, "_forkserver_alive_fd"), (resource_tracker._resource_tracker, "_fd")):
        if (descriptor := getattr(helper, name)) is not None:
            os.close(descriptor)
            setattr(helper, name, None)  # an agent that needs it starts its own


class _Output:
    """What a runner prints: passed on until it is too much for the minute.

    Args:
        sources: Where its stdout and stderr are read, each with the number where they are written.
    """

    def __init__(self, title: str, sources: dict[int, int]) -> None:
        self.sources, self._title = sources, title
        self._minute, self._left = 0.0, dict[int, int]()

    def forward(self, source: int) -> None:
        """Read what there is, and write it if it is not too much."""
        data = os.read(source, 1 << 16)
        if not data:
            del self.sources[source]
            return
        if time.monotonic() > self._minute:
            self._minute, self._left = time.monotonic() + 60.0, dict.fromkeys(self.sources, PRINTED)
        before = self._left[source]
        self._left[source] = before - len(data)
        self._write(self.sources[source], data[: max(0, before)])
        if self._left[source] < 0 <= before:
            line = f"prints more than {PRINTED // 1000} kB in a minute: the rest of this minute is dropped"
            self._write(2, f"\nagentrig: {self._title} {line}\n".encode())

    @staticmethod
    def _write(number: int, data: bytes) -> None:
        with contextlib.suppress(OSError):  # nobody reads it any more
            while data:
                data = data[os.write(number, data) :]


def _leave_as(status: int) -> NoReturn:
    """End this process as the runner has ended: with its exit code, or by its signal."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (number,))
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


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
