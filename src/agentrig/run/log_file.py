"""What a run warns of, in its directory: `log.jsonl`, one object a warning, for pages that show a run while it runs."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrig.run.files import append_line
from agentrig.text import cut, storable

log = logging.getLogger(__name__)

MOST = 1000
"""Warnings that a start of a run writes; the terminal has them all."""


PASSING = "agentrig.processes.ends"
"""The logger of what a signal does: that is for the person at the terminal, and soon over."""


class Warnings(logging.Handler):
    """Appends the warnings and errors of agentrig and of its plugins to a file, once `begin` has named it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._file: Path | None = None
        self._left, self._early = MOST, list[dict[str, Any]]()

    def begin(self, file: Path, step: Callable[[], int]) -> None:
        """Write the lines so far, and each further one at once.

        Args:
            file: Where to; it is made with the first line.
        """
        self._file, self._step = file, step
        for line in self._early:
            self._append(line)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or keep it until `begin`."""
        if not record.name.startswith("agentrig") or record.name == PASSING or self._left <= 0:
            return
        self._left -= 1
        text = cut(storable(record.getMessage()), 2000)
        line = {"time": time.time(), "step": 0, "level": record.levelname.lower(), "text": text}
        if self._file is None:
            self._early.append(line)
        else:
            self._append(line)

    def _append(self, line: dict[str, Any]) -> None:
        assert self._file is not None
        try:
            append_line(self._file, json.dumps({**line, "step": self._step()}))
        except OSError as error:  # a full disk is met by the run itself where it matters
            self._left = 0
            log.warning("%s cannot be written, so it lacks this run's warnings: %s", self._file, error.strerror)


@contextmanager
def warnings_kept() -> Iterator[Warnings]:
    """Keep the warnings that are logged in this block for a file, which `begin` of what it yields names."""
    handler, root = Warnings(), logging.getLogger()
    root.addHandler(handler)
    try:
        yield handler
    finally:
        root.removeHandler(handler)
