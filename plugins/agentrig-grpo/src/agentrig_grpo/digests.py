"""Digests of the trained weights after a step: a resumed run begins with no others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch  # noqa: TID253  (imported with the learner only)

from agentrig.delivery.digests import begun


@torch.no_grad()
def tensor_digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return a digest (`agentrig.delivery.digests`) for each group of tensors: a layer, or a tensor outside of layers.

    The tensors of a layer are joined in the order of their names, because small ones cost as much as large ones.
    """
    return begun(_groups(tensors)).result()


def _groups(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for name in sorted(tensors):
        groups[group_of(name)].append(name)
    return ((group, _joined([tensors[name] for name in names])) for group, names in groups.items())


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of tensors of one device, one after the other."""
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat([t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors])


def group_of(name: str) -> str:
    """Return a tensor's group: its name up to the number of its layer; the whole name without such a number."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts) - 1)
    return ".".join(parts[: number + 1])
