"""Handles Ctrl-C, SIGTERM and SIGHUP, while a command starts and later."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

log = logging.getLogger(__name__)

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Signals that ask a process to end: from the user, from Slurm or Kubernetes, or from a terminal that closes."""


_exit = os._exit


class Interrupted(KeyboardInterrupt):
    """A signal ended a command.

    Args:
        number: The signal's number.
        message: How the command ended, and what to do.

    Attributes:
        abandoned: Whether a thread that could not be stopped is still running; see `leave`.
    """

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number
        self.abandoned = False

    @property
    def exit_status(self) -> int:
        """128 plus the signal's number, as in a shell: 130, 143 or 129."""
        return 128 + self.number


@contextmanager
def no_silent_end() -> Iterator[None]:
    """Make `os._exit` raise in this process, and `posix._exit` too: a plugin's call would end a command in silence."""
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
    try:
        yield
    finally:
        for module in modules:
            module._exit = before


def name_of(number: int) -> str:
    """Return a signal's name: `Ctrl-C`, `SIGTERM`, `SIGHUP`."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


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
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)


def interrupt(number: int, frame: Any) -> NoReturn:
    """Raise `Interrupted`: the handler of a command that has nothing to save."""
    raise Interrupted(number, f"interrupted by {name_of(number)}")


class RunSignals:
    """The signal handler of a run.

    While the run starts, the first signal ends it: there is nothing to save. Later, the first signal ends the run
    after the current step, and the second one ends it immediately. While the summary and the report are written,
    the first signal waits for them.

    Args:
        session: The run's session; its `stopping` is set.
        abort: Ends the run immediately, with the given error.
    """

    def __init__(self, session: Any, abort: Callable[[Interrupted], None]) -> None:
        self._session, self._abort = session, abort
        self._at_once = f"ended at once; resume with: {session.resumes}"
        self.first: int | None = None
        self.writing = False

    def __call__(self, number: int, frame: Any) -> None:
        """Handle a signal."""
        again, self.first = self.first is not None, self.first or number
        if self.writing:
            if again:
                raise Interrupted(number, self._at_once)
            log.warning("%s: the summary and the report are written first; once more ends at once", name_of(number))
            return
        self._session.stopping = True
        if again:
            self._abort(Interrupted(self.first, self._at_once))
        elif not self._session.begun:
            self._abort(Interrupted(number, f"interrupted by {name_of(number)} while the run started"))
        else:
            log.warning("%s: ending after this step; %s once more ends at once", name_of(number), name_of(number))


def leave(status: int, *, within_s: float | None = None) -> NoReturn:
    """Run the exit handlers and end this process, even if one of its threads still runs.

    Args:
        status: The exit status.
        within_s: Seconds that the exit handlers may take; None for as long as they need.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if within_s is None:
        atexit._run_exitfuncs()
    else:
        handlers = threading.Thread(target=atexit._run_exitfuncs, daemon=True)
        handlers.start()
        handlers.join(within_s)
    _exit(status)
