"""What a run warns of, in its directory: `log.jsonl`, one object a warning, for pages that show a run while it runs."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrig.run.files import append_line
from agentrig.text import cut, storable

MOST = 1000
"""Warnings that a start of a run writes; the terminal has them all."""


class Warnings(logging.Handler):
    """Appends the warnings and errors of agentrig and of its plugins to a file, from the call of `begin` on."""

    def __init__(self, file: Path, step: Callable[[], int]) -> None:
        super().__init__(logging.WARNING)
        self._file, self._step, self._left = file, step, MOST
        self._early: list[str] | None = []

    def begin(self) -> None:
        """Write the lines so far, and each further one at once."""
        early, self._early = self._early, None
        for line in early or ():
            self._append(line)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or keep it until `begin`."""
        if not record.name.startswith("agentrig") or self._left <= 0:
            return
        self._left -= 1
        line = {
            "time": time.time(),
            "step": self._step(),
            "level": record.levelname.lower(),
            "text": cut(storable(record.getMessage()), 2000),
        }
        if self._early is None:
            self._append(json.dumps(line))
        else:
            self._early.append(json.dumps(line))

    def _append(self, line: str) -> None:
        try:
            append_line(self._file, line)
        except OSError:  # the disk is full: the run itself meets that where it matters
            self._left = 0


@contextmanager
def warnings_in(file: Path, step: Callable[[], int]) -> Iterator[Warnings]:
    """Append the warnings that are logged in this block to a file, once the run has begun.

    Args:
        file: Where to; it is made with the first warning.
        step: Returns the step that is under way.
    """
    handler, root = Warnings(file, step), logging.getLogger()
    root.addHandler(handler)
    try:
        yield handler
    finally:
        root.removeHandler(handler)
