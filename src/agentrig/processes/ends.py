"""Handles Ctrl-C, SIGTERM and SIGHUP, while a command starts and later; ends what a plugin's code leaves running."""

from __future__ import annotations

import atexit
import gc
import logging
import mmap
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn

from agentrig.errors import short_path

if TYPE_CHECKING:
    import psutil

log = logging.getLogger(__name__)

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Signals that ask a process to end: from the user, from Slurm or Kubernetes, or from a terminal that closes."""


AT_ONCE_S = 1.5
"""Seconds that a command may take to end after the second signal; then this process ends as if it were killed."""

LEFT_S = 5.0
"""Seconds that Python may wait for threads at the end of a command."""

POOLS_S = 2.0
"""Seconds that the pools of multiprocessing may take to end their workers, which are killed then."""

_exit = os._exit
_command = False  # whether this process is a command of ours: it may end itself


class Interrupted(KeyboardInterrupt):
    """A signal ended a command.

    Args:
        at_once: Whether it was the second one: the current step is lost, and no page is written.

    Attributes:
        abandoned: Whether a thread that could not be stopped is still running; see `leave`.
        told: Whether the command has printed the message.
    """

    def __init__(self, number: int, message: str, *, at_once: bool = False) -> None:
        super().__init__(message)
        self.number, self.at_once = number, at_once
        self.abandoned = self.told = False

    @property
    def exit_status(self) -> int:
        """128 plus the signal's number, as in a shell: 130, 143 or 129."""
        return 128 + self.number


@contextmanager
def no_silent_end() -> Iterator[None]:
    """Make `os._exit` raise in this process, and `posix._exit` too: a plugin's call would end a command in silence."""
    global _command
    own = os.getpid()

    def refuse(status: int) -> NoReturn:
        if os.getpid() != own:  # a process that was forked from this one
            _exit(status)
        raise RuntimeError(
            f"it called os._exit({status}), which would end the command without a word; raise an error instead"
        )

    modules: Any = (os, sys.modules[os.name])
    before = os._exit  # a block around this one may refuse it too
    for module in modules:
        module._exit = refuse
    _command = True
    try:
        yield
    finally:
        _command = False
        for module in modules:
            module._exit = before


_told = mmap.mmap(-1, 1)
"""Whether a fork has been told of; this process shares it with what is forked from it."""

_forked_at = ""
"""FILE:LINE in FUNCTION of what has called `os.fork`, in the process that it has made."""


_has_forked = False  # whether this process has

_handled: set[int] = set()
"""The signals that `handling` handles in this process."""


def _note_fork() -> None:
    global _forked_at, _has_forked
    frame = sys._getframe(1)
    _forked_at = f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"
    _has_forked = False
    for number in _handled:  # the handlers are those of a command; Ctrl-C is for the command, which ends this process
        signal.signal(number, (lambda *_: None) if number == signal.SIGINT else signal.SIG_DFL)
    _handled.clear()


def _note_own_fork() -> None:
    global _has_forked
    _has_forked = True


os.register_at_fork(after_in_child=_note_fork, after_in_parent=_note_own_fork)


@contextmanager
def forks_ended(who: str) -> Iterator[None]:
    """Run a plugin's code: a process that it forks, and that leaves this block, ends; it would go on as this one.

    It is told of once, because each call may fork.
    """
    own = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != own:
            if not _told[0]:
                _told[0] = 1
                end = "End a child by os._exit, or start a program by subprocess"
                say(f"{who} forked ({_forked_at}), and the child came back: it is ended. {end}")
            _exit(1)


def say(text: str) -> None:
    """Write to standard error, without the lock of `sys.stderr`: another thread may hold it."""
    with suppress(OSError):
        os.write(2, f"agentrig: {text}\n".encode())


def end_forks() -> None:
    """Kill what was forked from this command and has started no program: it would hold the command's files for ever."""
    if not _has_forked:
        return
    import psutil  # here because every command imports this module

    _end_pools()
    own, ended = psutil.Process(), []
    for process in own.children(recursive=True):
        with suppress(psutil.Error):
            if process.cmdline() == own.cmdline():
                process.kill()
                ended.append(process)
    if ended:
        psutil.wait_procs(ended, timeout=1.0)
        what = "1 process" if len(ended) == 1 else f"{len(ended)} processes"
        say(f"{what} that a plugin has forked still ran: ended with this command")


def _end_pools() -> None:
    """End the pools of multiprocessing: one starts new workers for those that are killed, and waits for them at exit.

    Each is ended once, so a pool that can't end within `POOLS_S` keeps no exit handler waiting.
    """
    if (pool := sys.modules.get("multiprocessing.pool")) is None:
        return
    pools = [each for each in gc.get_objects() if type(each) is pool.Pool]
    threads = [threading.Thread(target=each.terminate, daemon=True) for each in pools]
    for thread in threads:
        thread.start()
    end = time.monotonic() + POOLS_S
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


HELPERS = ("resource_tracker", "forkserver")
"""Processes of multiprocessing that end with this one, after the last of what they keep count of."""

_started: dict[psutil.Process, str] = {}
"""A process that a plugin's code has started, to whose code that was."""


def note_started(started: Collection[int], who: str) -> None:
    """Note the children of this process that a plugin's code has started; see `end_started`."""
    if not started:
        return
    import psutil  # here because every command imports this module

    for pid in started:
        with suppress(psutil.Error):  # it has ended
            _started[psutil.Process(pid)] = who


def end_started(only: Collection[int] | None = None) -> None:
    """Kill the processes that plugins' code has started and that still run, with what they have started, and say so.

    Args:
        only: The ids of those that are meant; None for all.
    """
    if not _started:
        return
    import psutil

    left, killed = defaultdict(list), []
    for process, who in list(_started.items()):
        if only is not None and process.pid not in only:
            continue
        del _started[process]
        with suppress(psutil.Error):
            if process.status() == psutil.STATUS_ZOMBIE or process.ppid() != os.getpid():
                continue
            if any(helper in word for word in process.cmdline() for helper in HELPERS):
                continue
            left[who].append(f"{process.name()} ({process.pid})")
            for each in [*process.children(recursive=True), process]:
                with suppress(psutil.Error):
                    each.kill()
                    killed.append(each)
    psutil.wait_procs(killed, timeout=1.0)
    for who, names in left.items():
        what = "a process" if len(names) == 1 else f"{len(names)} processes"
        say(f"{who} left {what} running: {', '.join(names):.200}: ended with this command")


def end_left(status: int) -> None:
    """End what plugins have left in this command, which is over: what they forked, and in `LEFT_S` their threads too.

    Python ends a process only after its threads, but for daemons. Programs that they have started may end by a handler
    at exit, so `end_started` comes after the last of these.
    """
    end_forks()
    if (multi := sys.modules.get("multiprocessing")) is not None:  # it waits at exit for those that are no daemons
        end_started({child.pid for child in multi.active_children() if not child.daemon})

    def others() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]

    def end() -> None:
        if not over.wait(LEFT_S):
            names = ", ".join(repr(thread.name) for thread in others())
            say(f"threads of a plugin still run, and this command ends without them: {names:.200}")
            try:
                leave(status, within_s=LEFT_S)
            finally:  # the output can't be written
                _exit(status)

    if others():
        over = threading.Event()
        atexit.register(over.set)  # Python waits for threads before
        threading.Thread(target=end, name="end", daemon=True).start()


def name_of(number: int) -> str:
    """Return a signal's name: `Ctrl-C`, `SIGTERM`, `SIGHUP`."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def signal_name(number: int) -> str:
    """Return the name of any signal, such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def ending(status: int | None, word: str = "exit status") -> str:
    """Return how a process ended: `exit status 3`, or `killed by SIGKILL` if its status is negative."""
    if status is not None and status < 0:
        return f"killed by {signal_name(-status)}"
    return f"{word} {status}"


@contextmanager
def handling(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Install a handler for the signals; does nothing outside the main thread.

    A SIGTERM or SIGHUP that was ignored before stays ignored: that is what `nohup` asks for.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {}
    for number in SIGNALS:
        if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, handler)
    outer = set(_handled)
    _handled.update(before)
    try:
        yield
    finally:
        _handled.clear()
        _handled.update(outer)
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)


def interrupt(number: int, frame: Any) -> NoReturn:
    """Raise `Interrupted`: the handler of a command that has nothing to save."""
    raise Interrupted(number, f"interrupted by {name_of(number)}")


class RunSignals:
    """The signal handler of a run.

    While the run starts, the first signal ends it: there is nothing to save. So it does while rollouts wait for a
    runner and none of them has begun. Otherwise the first signal ends the run after the current step or measurement,
    and the second one ends it immediately. After training, the first signal waits for the measurement, the summary and
    the report: the run is complete then.

    Args:
        session: The run's session; its `stopping` is set, its `advice` says how to go on, its `measuring` which
            measurement outside of a step is under way, its `checking` which step is audited (0: none), and its
            `untouched` whether no rollout has begun.
    """

    def __init__(self, session: Any, abort: Callable[[Interrupted], None]) -> None:
        self._session, self._abort = session, abort
        self.first: int | None = None
        self.writing = False

    def __call__(self, number: int, frame: Any) -> None:
        """Handle a signal."""
        again, self.first = self.first is not None, self.first or number
        error = Interrupted(self.first, f"ended at once; {self._session.advice()}", at_once=True)
        if again:
            end_soon(error)
        if self.writing:
            if again:
                raise error
            log.warning("%s: the summary and the report are written first; once more ends at once", name_of(number))
            return
        measuring = self._session.measuring
        self._session.stopping |= measuring != "after"  # else the run ends then
        if again:
            self._abort(error)
        elif not self._session.begun:
            self._abort(Interrupted(number, f"interrupted by {name_of(number)} while the run started"))
        elif self._session.untouched:
            waited = f"ended while its rollouts waited for a runner; {self._session.advice()}"
            self._abort(Interrupted(number, waited))
        else:
            checking, name = self._session.checking, name_of(number)
            step = f"step {checking} is checked and saved" if checking else "this step"
            what = "the measuring" if measuring else step
            log.warning("%s: ending after %s; %s once more ends at once", name, what, name)


def asked_to_end() -> bool:
    """Whether a signal has asked the run of this process to end after its step or measurement."""
    handler = signal.getsignal(signal.SIGINT)
    return isinstance(handler, RunSignals) and handler.first is not None


def end_soon(error: Interrupted) -> None:
    """End this process after `AT_ONCE_S` if it is a command and still runs then, with the error's message.

    Files are written so that a run can be killed at any time, and what it started ends with it.
    """

    def end() -> None:
        time.sleep(AT_ONCE_S)
        if not _command:
            return
        with suppress(Exception):
            end_forks()
            end_started()
            wake_stopped()
        if not error.told:
            shown = "\x1b[?25h" if os.isatty(2) else ""  # the cursor, which a display has hidden
            os.write(2, f"{shown}agentrig: {error}\n".encode())  # another thread may hold the lock of sys.stderr
        _exit(error.exit_status)

    threading.Thread(target=end, name="end", daemon=True).start()


def wake_stopped() -> None:
    """Let the processes below this one go on, which ends: one that is stopped (SIGSTOP) would not see it, and stay."""
    import psutil

    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            process.resume()


def end_now(status: int) -> None:
    """End this process as if it were killed, if it is a command: it can't even end in order any more."""
    if _command:
        _exit(status)


def leave(status: int, *, within_s: float | None = None) -> NoReturn:
    """Run the exit handlers and end this process, even if one of its threads still runs.

    Args:
        within_s: Seconds that the exit handlers may take; None for as long as they need.
    """
    end_forks()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    if within_s is None:
        atexit._run_exitfuncs()
    else:
        handlers = threading.Thread(target=atexit._run_exitfuncs, daemon=True)
        handlers.start()
        handlers.join(within_s)
    _exit(status)
