"""Work in threads of its own, which never keep the process alive: one call, or an observer's work in its order."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import attrs

from agentrig.text import words_of

log = logging.getLogger(__name__)

T = TypeVar("T")

_late: set[Background] = set()


@attrs.define(kw_only=True)
class Writes:
    """What became of the work that an observer was given.

    Attributes:
        written: Number of pieces that are done.
        failed: Number of pieces that raised.
        dropped: Number of pieces that were not taken: too many were waiting, or the run no longer waits for any.
        unsent: Number of pieces that were waiting or under way when the run stopped waiting for them.
        error: The latest exception as text; None without one.
    """

    written: int = 0
    failed: int = 0
    dropped: int = 0
    unsent: int = 0
    error: str | None = None


def in_background(call: Callable[[], T], name: str) -> Future[T]:
    """Call something in a daemon thread of this name; `result` waits, and raises what the call raised."""
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(call())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return found


class Background:
    """A thread that does one observer's work in its order.

    The thread starts with the first piece of work. It is a daemon: it never keeps the process alive.

    Args:
        name: Whose work it is, for messages: `tracker wandb`.
        limit: Most pieces of work that may wait; further ones are dropped and counted.
        patience_s: Seconds, in all, that `settle` waits.
    """

    def __init__(self, name: str, *, limit: int, patience_s: float) -> None:
        self.name = name
        self.writes = Writes()
        self._left_s = patience_s
        self._waiting: queue.Queue[Callable[[], Any]] = queue.Queue(limit)
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._open = 0
        self._ended = False

    def put(self, work: Callable[[], Any]) -> bool:
        """Let the thread do a piece of work; return at once whether it was taken."""
        with self._changed:
            if self._ended:
                self.writes.dropped += 1
                return False
            try:
                self._waiting.put_nowait(work)
            except queue.Full:
                self.writes.dropped += 1
                if self.writes.dropped == 1:
                    log.warning(
                        "%s is too slow: %d writes wait, and further ones are dropped. The run's own files have "
                        "everything",
                        *(self.name, self._waiting.maxsize),
                    )
                return False
            self._open += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
                self._thread.start()
        return True

    def settle(self) -> Writes:
        """Wait until all work is done, but in all calls together no longer than `patience_s`; return the counts.

        If the time is over, nothing more is taken, and what is left counts as `unsent`.
        """
        start = time.monotonic()
        with self._changed:
            done = self._changed.wait_for(lambda: not self._open, self._left_s)
            self._left_s = max(0.0, self._left_s - (time.monotonic() - start))
            self.writes.unsent = self._open
            if not done and not self._ended:
                self._ended = True
                _late.add(self)
                log.warning(
                    "%s has not finished: the run stops waiting for its last %d writes. The run's own files have "
                    "everything",
                    *(self.name, self._open),
                )
            return attrs.evolve(self.writes)

    def _work(self) -> None:
        while True:
            work, error = self._waiting.get(), None
            if not self._ended:
                try:
                    work()
                except (Exception, SystemExit) as raised:
                    error = raised
            with self._changed:
                self._open -= 1
                if not self._ended:
                    self._count(error)
                self._changed.notify_all()

    def _count(self, error: BaseException | None) -> None:
        if error is None:
            self.writes.written += 1
            return
        self.writes.failed += 1
        self.writes.error = words_of(error)
        level = logging.WARNING if self.writes.failed == 1 else logging.DEBUG
        log.log(level, "%s failed, and the run continues without it: %s", self.name, self.writes.error)
        log.debug("%s failed", self.name, exc_info=error)


def late() -> set[Background]:
    """Return those that a run stopped waiting for, and whose threads are still at work."""
    return {one for one in _late if one._open}
