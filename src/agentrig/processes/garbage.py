"""When Python looks for unreachable cycles: not while libraries load, and never among what they have loaded.

Torch, Agent Lightning and what they need make a million objects that stay. Python looks through all of them several
times while they load, again with every full collection of a run, half a second each, and four times at the exit.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EACH = 10_000
"""New objects after which Python looks for cycles: a rollout makes thousands that are freed without that."""


@contextmanager
def loading() -> Iterator[Callable[[], None]]:
    """Collect nothing until the function that is given is called; never look through what there is then.

    In the end everything is as before, also where that function was not called.
    """
    before, often = gc.isenabled(), gc.get_threshold()

    def loaded() -> None:
        settle()
        if before:
            gc.enable()

    gc.disable()
    try:
        yield loaded
    finally:
        gc.unfreeze()
        gc.set_threshold(*often)
        if before:
            gc.enable()


def settle() -> None:
    """Collect once, leave out what there is now from all later collections, and make these less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(EACH, *gc.get_threshold()[1:])


def leave_to_the_system() -> None:
    """Let this process end without a last search; the system takes its memory back."""
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
