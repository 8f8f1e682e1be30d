"""How far a measurement is, on standard error."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from agentrig.text import amount

STARTING_S = 10.0
"""Seconds between two lines before the first rollout has ended, in a file or a pipe; a terminal has one that counts."""

RARELY_S = 30.0
"""Seconds between two lines where nobody watches: in a file or a pipe."""


class Progress:
    """Counts rollouts as they end: on a terminal in one line that is written again, elsewhere in a line each 30 s.

    Args:
        of: How many there are to be.
        terminal: Whether standard error is a terminal.
    """

    def __init__(self, of: int, *, terminal: bool) -> None:
        self._of, self._terminal = of, terminal
        self._lock = threading.Lock()
        self._ended = self._right = self._told = 0
        self._waited = False
        self._what = "starting"
        self._since = self._said = time.monotonic()

    def begin(self) -> None:
        """Count the seconds from here, where the rollouts begin: the seconds before were those of the start."""
        with self._lock:
            self._what, self._since = "no rollout has ended yet", time.monotonic()

    def __call__(self, rollout: Any) -> None:
        """Count a rollout; may be called from several threads."""
        with self._lock:
            self._ended += 1
            self._right += bool(rollout.correct)
            if self._terminal:
                self._clear(self._waited and self._ended == 1)
                click.echo(f"\r{self._text()}", err=True, nl=False)
            elif time.monotonic() - self._said >= RARELY_S:
                self._said, self._told = time.monotonic(), self._ended
                click.echo(self._text(), err=True)

    def _text(self) -> str:
        return f"  {self._ended} of {amount(self._of, 'rollout')}, {self._right} right"

    def wait(self, done: threading.Event) -> None:
        """Count the seconds until the first rollout ends, or until `done` is set."""
        while not done.wait(1.0 if self._terminal else STARTING_S):
            with self._lock:
                if self._ended:
                    return
                self._waited = True
                text = f"  {self._what}: {time.monotonic() - self._since:.0f} s"
                click.echo(f"\r{text}" if self._terminal else text, err=True, nl=not self._terminal)

    def clear(self) -> None:
        """Remove the line from a terminal; elsewhere write the last count, if there were lines before it."""
        if self._terminal:
            self._clear(bool(self._ended or self._waited))
        elif (self._waited or self._told) and self._told < self._ended:
            click.echo(self._text(), err=True)

    def _clear(self, there: bool) -> None:
        if there:
            click.echo("\r\x1b[K", err=True, nl=False, color=True)


@contextmanager
def progress(of: int) -> Iterator[Progress]:
    """Give a `Progress`, and remove its line at the end."""
    shown = Progress(of, terminal=sys.stderr.isatty())
    done = threading.Event()
    waiting = threading.Thread(target=shown.wait, args=(done,), daemon=True, name="progress")
    waiting.start()
    try:
        yield shown
    finally:
        done.set()
        waiting.join()
        shown.clear()
