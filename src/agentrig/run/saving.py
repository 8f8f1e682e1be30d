"""When a run saves, and the thread that writes its checkpoints while the training goes on."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

from agentrig.background import in_background
from agentrig.errors import ConfigError
from agentrig.hardware.memory import in_words
from agentrig.learners import StepSettings
from agentrig.run.checkpoints import Checkpoints

log = logging.getLogger(__name__)

SHARE = 0.05
"""Of a run's time: what its checkpoints may cost, with `save_every = "auto"`."""

SLOWER = 0.25
"""How much slower steps are taken to be beside a write: up to 1.2 times as long was measured, with 21.6 GB a write."""

LOST_S = 600.0
"""Seconds of work that a crash may cost, with `save_every = "auto"`; this comes before `SHARE`."""

SMALL = 64_000_000
"""Bytes: a checkpoint of at most this size is saved after every step, with `save_every = "auto"`."""

SMALL_S = 1.0
"""Seconds: unless the run waited longer for the last one, because the disk is slow."""


def is_due(*, since_s: float, step_s: float, waited_s: float | None, write_s: float, busy: bool, size: int) -> bool:
    """Whether `save_every = "auto"` saves now.

    It does if the last checkpoint cost at most `SHARE` of the time since then, or if otherwise a crash during the next
    step would cost more than `LOST_S` of work. Its cost is what the run waited for it, and `SLOWER` of the time of its
    write. A small checkpoint is saved after every step.

    Args:
        since_s: Seconds since the state of the last checkpoint was copied, or since the run's start.
        waited_s: Seconds that the run waited for the last checkpoint; None before the first.
        write_s: Seconds that the last write took in the background.
        size: Bytes of a checkpoint; 0 if the learner does not say.
    """
    if 0 < size <= SMALL and (waited_s or 0.0) <= SMALL_S:
        return True
    if since_s + step_s + write_s > LOST_S:
        return True
    if busy:
        return False
    return waited_s is None or waited_s + SLOWER * write_s <= SHARE * since_s


class Saving:
    """Saves a run's checkpoints: their state is copied while the run waits, and written in a thread of its own.

    One write is under way at most. Use it in a `with` statement: its end waits for the last write.

    Args:
        every: `algorithm.save_every`: the number of steps from one checkpoint to the next, or `auto` (see `is_due`).

    Attributes:
        size: Bytes of a checkpoint, as the learner estimates them; 0 if it does not say.
    """

    def __init__(self, every: int | Literal["auto"]) -> None:
        self.size = 0
        self._every = every
        self._writing: Future[float] | None = None
        self._copied = self._stepped = time.perf_counter()
        self._waited_s: float | None = None  # for the last checkpoint
        self._write_s = 0.0
        self._untold_s: float | None = None  # since the last `waited`

    def __enter__(self) -> Saving:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.settle()
            return
        try:  # the files that it writes must not change any more when the run has ended
            self.settle()
        except Exception as failed:
            log.error("%s", failed)

    def due(self, step: int) -> bool:
        """Whether a step is saved; call it once for each step, at its end."""
        now = time.perf_counter()
        step_s, self._stepped = now - self._stepped, now
        if self._every != "auto":
            return step % self._every == 0
        return is_due(
            since_s=now - self._copied,
            step_s=step_s,
            waited_s=self._waited_s,
            write_s=self._write_s,
            busy=self._writing is not None and not self._writing.done(),
            size=self.size,
        )

    def save(self, copy: Callable[[], Callable[[], object]]) -> None:
        """Save a checkpoint: wait for the write that is under way, copy the state, and begin to write it.

        Args:
            copy: Copies what is saved, and returns what writes the copy. The second is called in another thread.
        """
        start, before = time.perf_counter(), self._untold_s or 0.0
        self.settle()
        write = copy()
        self._copied = time.perf_counter()
        self._waited_s = self._copied - start
        self._untold_s = before + self._waited_s

        def timed() -> float:
            begun = time.perf_counter()
            write()
            return time.perf_counter() - begun

        self._writing = in_background(timed, "checkpoint")

    def check(self) -> None:
        """Raise what a write has raised; do not wait."""
        if self._writing is not None and self._writing.done():
            self.settle()

    def settle(self) -> None:
        """Wait until the checkpoint that is being written is complete; without one, do nothing.

        Raises:
            RunFileError: The disk is full, or a file cannot be written.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        start = time.perf_counter()
        self._write_s = writing.result()
        self._untold_s = (self._untold_s or 0.0) + time.perf_counter() - start

    def waited(self) -> dict[str, float]:
        """Return how long the run has waited for checkpoints since the last call: `{"checkpoint": seconds}`.

        It is empty if no checkpoint was copied or completed since.
        """
        waited, self._untold_s = self._untold_s, None
        return {} if waited is None else {"checkpoint": waited}


def writes_of(settings: StepSettings, first_step: int = 1) -> tuple[int, int]:
    """Return how many checkpoints a run writes at most, and how many of these `keep_every` keeps for good."""
    steps = range(first_step, settings.steps + 1)
    every = 1 if settings.save_every == "auto" else settings.save_every
    kept = sum(step % settings.keep_every == 0 for step in steps) if settings.keep_every else 0
    return max(1, -(-len(steps) // every)), kept


def at_once(writes: int, kept: int, *, saved: bool = False) -> int:
    """Return how many of these are on the disk at once; `saved` if an older one makes room for the first."""
    return min(writes, (1 if saved else 2) + kept)  # one is complete before the last one is removed


def check_room(folder: Path, *, size: int, writes: int, kept: int, resumed: bool = False) -> None:
    """Compare what a run's checkpoints will take with what is free on their disk, before the first step.

    Args:
        size: Bytes of one checkpoint.
        writes: How many the run will write, at most.
        kept: How many of these `keep_every` keeps for good.
        resumed: Whether the run goes on in its directory, with the model and the optimizer that it has.
    """
    free = shutil.disk_usage(folder if folder.is_dir() else folder.parent).free
    number = at_once(writes, kept, saved=bool(Checkpoints(folder).steps()))
    if size > free:
        other = (
            "move the run directory to another disk"
            if resumed
            else "choose another disk with run.directory=DIR. algorithm.lora_rank=16 or algorithm.optimizer=adamw8bit "
            "makes it smaller"
        )
        raise ConfigError(
            f"a checkpoint of this run has about {in_words(size)}, and {folder} has {in_words(free)} free: not even "
            f"one fits. Free some space, or {other}"
        )
    if number * size > free:
        more = f", {kept} of which algorithm.keep_every keeps" if kept else ""
        log.warning(
            "%d checkpoints of about %s will be on the disk at once%s: %s, and %s has %s free. When it is full, the "
            "run ends. Free some space%s",
            *(number, in_words(size), more, in_words(number * size), folder, in_words(free)),
            ", or raise algorithm.keep_every" if kept else "",
        )
