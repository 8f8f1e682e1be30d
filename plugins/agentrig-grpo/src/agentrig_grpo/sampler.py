"""Which tasks a step trains on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def tasks_of_step(tasks: Sequence[T], *, n: int, step: int, seed: int) -> list[T]:
    """Return a step's tasks: each epoch shuffles all tasks, and steps take consecutive slices.

    The result depends only on the arguments, so a resumed run continues exactly.

    Args:
        tasks: All of them.
        n: Tasks of a step. If there are fewer tasks, some come twice.
        step: From 1.
        seed: The run's.

    Raises:
        ValueError: There are no tasks.
    """
    if not tasks:
        raise ValueError("there are no training tasks")
    chosen: list[T] = []
    place = (step - 1) * n
    while len(chosen) < n:
        epoch, offset = divmod(place, len(tasks))
        order = list(range(len(tasks)))
        random.Random(f"tasks {seed} {epoch}").shuffle(order)
        taken = order[offset : offset + n - len(chosen)]
        chosen += [tasks[i] for i in taken]
        place += len(taken)
    return chosen
