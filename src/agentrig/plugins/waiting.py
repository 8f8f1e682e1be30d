"""Names the plugin, file and line that a command waits for, while it waits."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from agentrig.errors import own_file, short_path
from agentrig.plugins.guard import GUARD

log = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""Seconds that a build, or a call of an observer, may take before a message names it."""


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

    timer = threading.Timer(PATIENCE_S, tell)
    timer.daemon = True
    timer.start()
    try:
        with GUARD.watching(what, cure=mend or cure, limit_s=limit_s):
            yield
    finally:
        timer.cancel()


def place(thread: int) -> str:
    """Return ` (FILE:LINE in FUNCTION)`: where a thread is; frames of Python and agentrig do not count."""
    frame = sys._current_frames().get(thread)
    while frame is not None and not own_file(frame.f_code.co_filename, installed=True):
        frame = frame.f_back
    if frame is None:
        return ""
    return f" ({short_path(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name})"
