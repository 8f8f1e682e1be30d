"""Names the plugin, file and line that a command waits for, while it waits."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from agentrig.errors import own_file, short_path

log = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""Seconds that a build, or a call of an observer, may take before a message names it."""


@contextmanager
def waiting_for(what: str, *, cure: str) -> Iterator[None]:
    """Log a warning, once, if the block takes longer than `PATIENCE_S`; it is not ended.

    Args:
        what: What runs in the block, for the message: `the build of the reward exact (agentrig-exact 1.2)`.
        cure: What to do about it.
    """
    thread = threading.get_ident()

    def tell() -> None:
        log.warning("%s has not ended after %g s%s. %s", what, PATIENCE_S, place(thread), cure)

    timer = threading.Timer(PATIENCE_S, tell)
    timer.daemon = True
    timer.start()
    try:
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
