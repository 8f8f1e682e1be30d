"""How far a measurement is, on standard error."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import click

from agentrig.text import amount

STARTING = "starting the agent and the model's server"
"""What is done before the first rollout begins, unless the server is there already."""

STARTING_S = 10.0
"""Seconds between two lines before the first rollout has ended, in a file or a pipe; a terminal has one that counts."""

READING_S = 3.0
"""The same before the first line of a command: on a busy machine, importing and reading take that long."""

RARELY_S = 30.0
"""Seconds between two lines where nobody watches: in a file or a pipe."""


class Progress:
    """Counts rollouts as they end.

    Args:
        of: How many there are to be.
        what: What is done before the first of them begins.
        first_s: Seconds to the first line where nobody watches.
        where: Which rollouts these are, to stand behind their number: "on validation tasks, greedy"; '' for none.
    """

    def __init__(self, of: int, what: str = STARTING, first_s: float = STARTING_S, where: str = "") -> None:
        self._of, self._first_s, self._where = of, first_s, where and f" {where}"
        self._lock = threading.Lock()
        self._ended = self._right = 0
        self._what, self._since = what, time.monotonic()

    def begin(self) -> None:
        """Count the seconds from here, where the rollouts begin: the seconds before were those of the start."""
        self._what, self._since = "no rollout has ended yet", time.monotonic()

    def tell_what(self, what: str, spent_s: float | None = None) -> None:
        """Change what is said to be done; its seconds go on, or on from `spent_s`."""
        self._what = what
        if spent_s is not None:
            self._since = time.monotonic() - spent_s

    def __call__(self, rollout: Any) -> None:
        """Count a rollout; may be called from several threads."""
        with self._lock:
            self._ended += 1
            self._right += bool(rollout.correct)

    def __str__(self) -> str:
        if self._ended:
            return f"  {self._ended} of {amount(self._of, 'rollout')}{self._where}, {self._right} right"
        return f"  {self._what}: {time.monotonic() - self._since:.0f} s"

    def tell(self, done: threading.Event) -> None:
        """Write a line now and then until `done` is set, and the last count if there were lines before it."""
        said, told = time.monotonic(), 0
        while not done.wait(1.0):
            starting_s = STARTING_S if told else self._first_s
            if time.monotonic() - said >= (RARELY_S if self._ended else starting_s):
                said, told = time.monotonic(), self._ended or -1
                click.echo(str(self), err=True)
        if told and told < self._ended:
            click.echo(str(self), err=True)


def reading(what: str) -> AbstractContextManager[Progress]:
    """Give a `Progress` without rollouts, for what comes before a command's first line: say soon what takes long."""
    return progress(0, f"reading {what}", READING_S)


@contextmanager
def progress(of: int, what: str = STARTING, first_s: float = STARTING_S, where: str = "") -> Iterator[Progress]:
    """Give a `Progress`: on a terminal it is one line, which goes away at the end."""
    shown = Progress(of, what, first_s, where)
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        console = Console(stderr=True)
        if not console.is_dumb_terminal:
            with Live(get_renderable=lambda: Text(str(shown)), console=console, transient=True, refresh_per_second=4):
                yield shown
            return
    done = threading.Event()
    telling = threading.Thread(target=shown.tell, args=(done,), daemon=True, name="progress")
    telling.start()
    try:
        yield shown
    finally:
        done.set()
        telling.join()
