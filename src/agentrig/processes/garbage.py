"""How often Python looks for unreachable cycles: seldom while libraries load, and never among what they have loaded.

Torch, Agent Lightning and what they need make a million objects that stay. Python looks through all of them several
times while they load, again with every full collection of a run, half a second each, and four times at the exit.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

LOADING = 200_000
"""New objects after which Python looks for cycles while libraries load."""

RUNNING = 10_000
"""The same afterwards: a rollout makes thousands that are freed without that."""


@contextmanager
def loading() -> Iterator[None]:
    """Collect seldom in this block, until `settle` is called; after it everything is as before."""
    before = gc.get_threshold()
    gc.set_threshold(LOADING, *before[1:])
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


def settle() -> None:
    """Collect once, and leave out what there is now from all later collections."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(RUNNING, *gc.get_threshold()[1:])


def leave_to_the_system() -> None:
    """Let this process end without a last search; the system takes its memory back."""
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
