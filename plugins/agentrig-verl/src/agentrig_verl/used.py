"""Reads from the rows that verl's actor got what it trained of each call, for the run's ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from agentrig.credit import CallWorth
from agentrig.ledger import LEFT_OUT_BY_CREDIT, ZERO_ADVANTAGE, Call, Entry
from agentrig_verl.counted import PRIME, Counted
from agentrig_verl.trajectories import Trajectory


@attrs.frozen
class UsedRow:
    """A row of an update of verl's actor.

    Attributes:
        key: Its key in TransferQueue.
        mask: verl's `response_mask` when the actor got it: 1 for tokens in the loss.
        gradient: For each token, whether its advantage differs from 0.
    """

    key: str
    mask: Sequence[int]
    gradient: Sequence[bool]


def rows_of(keys: Sequence[str], tags: Sequence[Mapping[str, Any]], data: Any) -> list[UsedRow]:
    """Return the rows of a batch, without those that verl added to fill a mini-batch.

    Args:
        data: Ragged fields `response_mask` and `advantages`.
    """
    rows = zip(keys, tags, data["response_mask"].unbind(), data["advantages"].unbind(), strict=True)
    return [
        UsedRow(key, mask.tolist(), (advantages != 0).tolist())
        for key, tag, mask, advantages in rows
        if not tag.get("is_padding")
    ]


def sent_rows(rows: Iterable[UsedRow], trajectories: Mapping[str, Trajectory]) -> Counted:
    """Return the count of the rows that were sent to the workers and have a token in the loss."""
    found = [row for row in rows if any(row.mask)]
    known = [trajectories[row.key].checksum for row in found if row.key in trajectories]
    return Counted(len(found), sum(sum(row.mask) for row in found), sum(known) % PRIME)


def entries_of(
    trajectories: Mapping[str, Trajectory],
    rows: Iterable[UsedRow],
    *,
    worths: Mapping[Call, CallWorth],
    always: bool,
    rejects: bool,
) -> list[Entry]:
    """Return the ledger's entries of a step.

    The calls of a missing row get no entry; those of a row that is there twice get two.

    Args:
        trajectories: What was written to TransferQueue, by key.
        worths: What the run's credit says of each call; empty if verl computes its own advantages.
        always: Whether rows with advantage 0 have a gradient too, from a KL loss or an entropy bonus.
        rejects: Whether rollout correction may take tokens out of the loss.
    """
    found = []
    for row in rows:
        pieces = trajectories[row.key].pieces if row.key in trajectories else ()
        inside: Counter[Call] = Counter()
        for call, start, length in pieces:
            inside[call] += sum(row.mask[start : start + length])
        for i, (call, start, length) in enumerate(pieces):
            tokens = inside[call]
            if i == 0:  # count tokens in the loss that no call sampled here: the ledger then finds too many
                tokens += sum(row.mask) - inside.total()
            worth = worths.get(call)
            if call in worths and worth is None:
                found.append(Entry(call, "dropped", length, LEFT_OUT_BY_CREDIT))
                found += [Entry(call, "trained", tokens)] if tokens else []
            elif (
                always
                or not any(row.mask)
                or any(row.gradient[start : start + length] if worths and tokens else row.gradient)
            ):
                found += [Entry(call, "trained", tokens, advantage=worth)] if tokens else []
                found += [Entry(call, "masked", length - tokens)] if rejects and tokens < length else []
            else:
                found.append(Entry(call, "dropped", length, ZERO_ADVANTAGE, worth))
        if not pieces and row.key not in trajectories:
            found.append(Entry(Call(f"(verl's row {row.key})", ""), "trained", sum(row.mask)))
    return found
