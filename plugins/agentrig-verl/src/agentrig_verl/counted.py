"""The workers' count of what they computed the loss over: rows, tokens, and a checksum of the rows.

They count where verl calls the loss function, for each micro-batch. The count is compared with the rows that were sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch  # noqa: TID253  (runs in verl's workers; imported by the trainer only)

from agentrig.errors import RunStopped

PREFIX = "loss_"
"""Of the names of the metrics; verl reduces those with `max` and `min` in their names in another way."""

PRIME = (1 << 40) - 87
"""The sums are taken modulo this, so that they are exact as floating-point numbers too."""


@attrs.frozen
class Counted:
    """Rows in a loss.

    Attributes:
        rows: Number of rows with a token in the loss.
        tokens: Number of these tokens.
        sum: Sum of the rows' checksums, modulo `PRIME`.
    """

    rows: int = 0
    tokens: int = 0
    sum: int = 0

    def metrics(self) -> dict[str, list[float]]:
        """Return the figures as a worker returns metrics."""
        return {f"{PREFIX}{name}": [float(value)] for name, value in attrs.asdict(self).items()}

    @classmethod
    def told(cls, metrics: Mapping[str, Any]) -> Counted | None:
        """Return what `metrics` returned, from verl's reduced metrics of an update; None without it."""
        names = [f"actor/{PREFIX}{name}" for name in attrs.fields_dict(cls)]
        return cls(*(int(metrics[name]) for name in names)) if all(name in metrics for name in names) else None


class Counter:
    """Counts the rows that a loss function is computed over.

    Args:
        loss: verl's loss function; called with `data`, a TensorDict with ragged `input_ids` and `response_mask`.
    """

    def __init__(self, loss: Callable[..., Any]) -> None:
        self._loss = loss
        self._total: torch.Tensor | None = None

    def __call__(self, *args: Any, **more: Any) -> Any:
        """Count, and compute the loss."""
        if torch.is_grad_enabled():
            found = in_loss(more["data"] if "data" in more else args[1])
            self._total = found if self._total is None else self._total + found
        return self._loss(*args, **more)

    def take(self, group: Any, device: str) -> Counted:
        """Return the count of all ranks since the last call.

        Args:
            device: Where the ranks' counts are summed.
        """
        total, self._total = self._total, None
        total = torch.zeros(3, dtype=torch.int64) if total is None else total
        total = total.to(device)
        if torch.distributed.get_world_size(group) > 1:
            torch.distributed.all_reduce(total, group=group)
        rows, tokens, found = total.tolist()
        return Counted(rows, tokens, found % PRIME)


def in_loss(data: Any) -> torch.Tensor:
    """Return rows, tokens and the sum of checksums of a batch, int64 [3], of the rows with a token in the loss."""
    mask, ids = data["response_mask"], data["input_ids"]
    values = mask.values() != 0
    tokens = torch.zeros(len(mask), dtype=torch.int64, device=values.device)
    tokens.index_add_(0, _owners(mask.offsets(), len(values)), values.long())
    kept = checksums(ids.values(), ids.offsets()) * (tokens > 0)
    return torch.stack([(tokens > 0).sum(), tokens.sum(), kept.sum()])


def checksums(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return a checksum of the token ids of each row, int64 [rows] below `PRIME`.

    Args:
        values: The concatenated ids of all rows.
        offsets: The start of each row, and the last end.
    """
    owners = _owners(offsets, len(values))
    places = torch.arange(len(values), device=values.device) - offsets[owners]
    # Products of two numbers below 2^31 fit; a token's share of the sum depends on its place.
    factors = (places * 2654435761 + 97) % 2147483647
    shares = (values.long() + 1) * factors % PRIME
    found = torch.zeros(len(offsets) - 1, dtype=torch.int64, device=values.device)
    return found.index_add_(0, owners, shares) % PRIME


def checksums_of(rows: Sequence[torch.Tensor]) -> list[int]:
    """Return the checksum of each row of token ids."""
    if not rows:
        return []
    lengths = torch.tensor([0, *map(len, rows)])
    found: list[int] = checksums(torch.cat(list(rows)), lengths.cumsum(0)).tolist()
    return found


def _owners(offsets: torch.Tensor, n: int) -> torch.Tensor:
    rows = torch.arange(len(offsets) - 1, device=offsets.device)
    return rows.repeat_interleave(offsets.diff(), output_size=n)


def compare(sent: Counted, told: Counted, *, step: int, epochs: int) -> None:
    """Check that the workers computed the loss over the rows that were sent, once in each epoch."""
    expected = Counted(sent.rows * epochs, sent.tokens * epochs, sent.sum * epochs % PRIME)
    if told == expected:
        return
    if told.rows < expected.rows or told.tokens < expected.tokens:
        what = "rows or tokens got lost in the workers"
    elif told.rows > expected.rows or told.tokens > expected.tokens:
        what = "rows or tokens were counted more than once in the workers"
    else:
        what = "some rows were replaced by others in the workers"
    times = f" in {epochs} epochs" if epochs > 1 else ""
    raise RunStopped(
        f"step {step}: verl's workers computed the loss over {told.rows} rows with {told.tokens} tokens; they were "
        f"sent {expected.rows} rows with {expected.tokens} tokens{times}: {what}.\n  "
        "What is learned is not what was sampled. Look at verl's keys of batch sizes and balancing, and report it",
        cause="lost-calls",
    )
