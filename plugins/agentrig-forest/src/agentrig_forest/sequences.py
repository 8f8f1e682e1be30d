"""The tensors of a pack for a forward pass that scores its samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from agentrig_forest.attention import Layout, layout_of
from agentrig_forest.segments import Pack, grow, packs, rows
from agentrig_forest.segments import Sample as Sample


@attrs.frozen(kw_only=True, eq=False)
class Batch:
    """Samples as tensors: T response tokens, predicted by the hidden states of U tokens.

    Attributes:
        ids: Token ids, [1, tokens] for a pack of a forest, [rows, length] with padding on the right otherwise.
        positions: Position of each token in its own prompt + response, like `ids`.
        layout: The tokens that each token attends to; None if each row is one sample with causal attention.
        at: Index into the flattened hidden states that predict response tokens, [U]; ascending, without duplicates.
        of: Which of them predicts each response token, [T]; ascending.
        targets: The response tokens, [T].
        sample: Which sample each response token belongs to, [T].
        place: Which token of its response each is, [T].
        computed: Tokens of `ids` without padding.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    layout: Layout | None
    at: torch.Tensor
    of: torch.Tensor
    targets: torch.Tensor
    sample: torch.Tensor
    place: torch.Tensor
    computed: int

    def to(self, device: torch.device) -> Batch:
        """Return the batch, with its layout, on a device."""
        moved: Batch = _moved(self, device)
        return moved

    def only(self, kept: torch.Tensor) -> Batch:
        """Return the batch with those response tokens that are kept, bool [T]."""
        which, of = torch.unique(self.of[kept], return_inverse=True)
        some = {name: getattr(self, name)[kept] for name in ("targets", "sample", "place")}
        return attrs.evolve(self, at=self.at[which], of=of, **some)


def _moved(value: Any, device: torch.device) -> Any:
    """Return a value with all tensors in it on a device."""
    if isinstance(value, torch.Tensor):
        # Only copies from pinned memory are asynchronous; others wait for all earlier work.
        return value.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else value.to(device)
    if attrs.has(type(value)):
        parts = {field.name: _moved(getattr(value, field.name), device) for field in attrs.fields(type(value))}
        return attrs.evolve(value, **parts)
    return type(value)(_moved(part, device) for part in value) if isinstance(value, list | tuple) else value


def packed(samples: Sequence[Sample], budget: int, *, share: bool) -> Iterator[Pack]:
    """Split samples into packs of at most `budget` tokens; see `forest.packs` and, without sharing, `forest.rows`."""
    if not samples:
        return iter(())
    return packs(grow(samples), budget) if share else rows(grow(samples, share=False), budget)


def collate(pack: Pack, *, share: bool, varlen: bool = False) -> Batch:
    """Turn a pack into tensors on the CPU; `share` as for `packed`, `varlen` to lay it out for FlashAttention."""
    forest = pack.forest
    parts = [forest.segments[i].tokens for i in pack.segments]
    length = max(len(p) for p in parts)
    if share:
        starts = [a for a, _ in pack.spans().values()]
        ids = np.concatenate(parts)[None].astype(np.int64)
        positions = np.concatenate(
            [np.arange(forest.segments[i].start, forest.segments[i].end) for i in pack.segments]
        )[None]
    else:
        starts = [row * length for row in range(len(parts))]
        ids = np.zeros((len(parts), length), dtype=np.int64)
        for row, part in zip(ids, parts, strict=True):
            row[: len(part)] = part
        positions = np.broadcast_to(np.arange(length), ids.shape)
    begin = dict(zip(pack.segments, starts, strict=True))
    at: list[np.ndarray] = []
    targets: list[int] = []
    sample: list[np.ndarray] = []
    place: list[np.ndarray] = []
    for index in pack.segments:
        if index not in pack.scored:
            continue
        path = np.concatenate(
            [np.arange(begin[i], begin[i] + len(forest.segments[i].tokens)) for i in forest.path(index)]
        )
        for i in forest.segments[index].ends:
            n = len(forest.samples[i].response_ids)
            at.append(path[-n:])  # the prompt's last token predicts the first of the response
            targets += forest.samples[i].response_ids
            sample.append(np.full(n, i))
            place.append(np.arange(n))
    unique, of = np.unique(np.concatenate(at), return_inverse=True)
    order = np.argsort(of, kind="stable")
    return Batch(
        ids=torch.from_numpy(ids),
        positions=torch.from_numpy(positions.copy()),
        layout=layout_of(pack, varlen=varlen) if share else None,
        at=torch.from_numpy(unique),
        of=torch.from_numpy(of[order]),
        targets=torch.from_numpy(np.array(targets, dtype=np.int64)[order]),
        sample=torch.from_numpy(np.concatenate(sample)[order]),
        place=torch.from_numpy(np.concatenate(place)[order]),
        computed=pack.tokens,
    )
