"""Names the plugin, file and line that a command waits for, while it waits."""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from agentrig.errors import own_file, short_path
from agentrig.plugins.guard import GUARD

log = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""Seconds that a build, or a call of an observer, may take before a message names it."""


class Watch:
    """Reports blocks that take long, from one thread for all: a thread for each would cost more than most blocks."""

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Start without a thread and without blocks: after a fork, the former ones belong to another process."""
        self._changed = threading.Condition()
        self._blocks: dict[object, tuple[float, Callable[[], None]]] = {}
        self._until = math.inf
        self._looking = False

    @contextmanager
    def over(self, patience_s: float, tell: Callable[[], None]) -> Iterator[None]:
        """Call `tell` in another thread, once, if the block takes longer than `patience_s`."""
        block, due = object(), time.monotonic() + patience_s
        with self._changed:
            if not self._looking:
                self._looking = True
                threading.Thread(target=self._look, name="agentrig-waiting", daemon=True).start()
            self._blocks[block] = due, tell
            if due < self._until:
                self._until = due
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._blocks.pop(block, None)

    def _look(self) -> None:
        while True:
            with self._changed:
                # Until the block that was due first, although it may have ended: no block has to wake this thread then.
                while (left := self._until - time.monotonic()) > 0:
                    self._changed.wait(None if left == math.inf else left)
                now = time.monotonic()
                late = [block for block, (due, _) in self._blocks.items() if due <= now]
                told = [self._blocks.pop(block)[1] for block in late]
                self._until = min((due for due, _ in self._blocks.values()), default=math.inf)
            for tell in told:
                tell()


WATCH = Watch()


@contextmanager
def waiting_for(what: str, *, cure: str, mend: str = "", limit_s: float = 0.0) -> Iterator[None]:
    """Log a warning, once, if the block takes longer than `PATIENCE_S`.

    Args:
        what: What runs in the block, for the message: `the build of the reward exact (agentrig-exact 1.2)`.
        cure: What to do while it runs.
        mend: What to do if the process ends in the block; by default the same.
        limit_s: Seconds after which a command is ended if the block has not ended; 0 for no limit.
    """
    thread = threading.get_ident()

    def tell() -> None:
        log.warning("%s has not ended after %g s%s. %s", what, PATIENCE_S, place(thread), cure)

    with WATCH.over(PATIENCE_S, tell), GUARD.watching(what, cure=mend or cure, limit_s=limit_s):
        yield


def place(thread: int) -> str:
    """Return ` (FILE:LINE in FUNCTION)`: where a thread is; frames of Python and agentrig do not count."""
    frame = sys._current_frames().get(thread)
    while frame is not None and not own_file(frame.f_code.co_filename, installed=True):
        frame = frame.f_back
    if frame is None:
        return ""
    return f" ({short_path(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name})"
