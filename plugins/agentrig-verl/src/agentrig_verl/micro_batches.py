"""Rows cut into micro-batches: what is computed in one pass of the model."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from agentrig_forest.segments import Pack, grow, packs

from agentrig_verl.rows import Row

IDLE = Row(index=-1, prompt_ids=(0,), response_ids=(0,), trained=np.ones(1, dtype=bool), length=2)
"""What is computed if no row of a micro-batch has a trained token; nobody reads the result."""


@attrs.frozen(eq=False)
class MicroBatch:
    """What is computed in one pass.

    Attributes:
        members: Its rows, for the loss function.
        pack: The tokens to compute.
        samples: The rows of the pack's forest.
    """

    members: Sequence[Row]
    pack: Pack
    samples: Sequence[Row]


def cut(rows: Sequence[Row], budget: int) -> list[MicroBatch]:
    """Cut rows into micro-batches of at most `budget` tokens, shared ones counted once.

    A row without a trained token costs nothing; the loss function gets it too.
    """
    trained = [row for row in rows if row.response_ids]
    rest = [row for row in rows if not row.response_ids]
    parts = [
        MicroBatch([trained[i] for i in sorted(pack.samples())], pack, trained) for pack in packs(grow(trained), budget)
    ]
    if not parts:
        return [micro_batch(rest)]
    parts[0] = attrs.evolve(parts[0], members=[*parts[0].members, *rest])
    return parts


def micro_batch(members: Sequence[Row]) -> MicroBatch:
    """Return rows as one micro-batch."""
    samples = [row for row in members if row.response_ids] or [IDLE]
    (pack,) = packs(grow(samples), sum(row.length for row in samples))
    return MicroBatch(members, pack, samples)


def split(parts: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Return one micro-batch more: that with the most rows is cut in two.

    Rows without a trained token are split off first: they cost nothing.

    Raises:
        ValueError: Each has a single row.
    """
    at = max(range(len(parts)), key=lambda i: len(parts[i].members))
    members = sorted(parts[at].members, key=lambda row: not row.response_ids)
    if len(members) < 2:
        raise ValueError(f"{len(parts)} rows cannot be cut further: the ranks have different numbers of rows")
    trained = sum(bool(row.response_ids) for row in members)
    middle = trained if 0 < trained < len(members) else len(members) // 2
    return [*parts[:at], micro_batch(members[:middle]), micro_batch(members[middle:]), *parts[at + 1 :]]
