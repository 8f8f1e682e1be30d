"""The weights that a decoder computes with, by name: filled all together or not at all."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch  # noqa: TID253  (imported in the server process only)

from agentrig.delivery.digests import Digests


class WeightsError(ValueError):
    """Weights do not fit the model, or are no numbers; names the tensor."""


class Diverged(WeightsError):
    """Weights hold NaN or infinity; names the tensor."""

    cure = "make the model again with a smaller learning rate, or copy it again if another copy of it is good"


class Parameters:
    """Where each named tensor of a model is kept.

    Args:
        tied: Names that may come along and are not looked at: they are another name's tensor.
    """

    def __init__(self, tied: Collection[str] = ()) -> None:
        self._tied = frozenset(tied)
        self._places: dict[str, tuple[torch.Tensor, torch.Size]] = {}
        self._freed: dict[int, tuple[torch.UntypedStorage, int]] = {}  # by torch's number of the storage

    def add(self, name: str, place: torch.Tensor, shape: Collection[int] | None = None) -> None:
        """Name a tensor, or a slice of one; `shape` is what comes when it differs (one row for all rows)."""
        self._places[name] = (place, place.shape if shape is None else torch.Size(shape))

    def check(self, state: Mapping[str, torch.Tensor], *, start: bool = False) -> None:
        """Make sure that every tensor is there, fits and holds numbers only.

        Args:
            start: They come from a model's files, which may be in another floating-point dtype and may hold more.

        Raises:
            WeightsError: Names the first tensor that is missing, unknown, misshapen, of another dtype or not finite.
        """
        for name, (place, shape) in self._places.items():
            if name not in state:
                raise WeightsError(f"{name} is missing")
            tensor = state[name]
            if tensor.shape != shape:
                raise WeightsError(f"{name} has the shape {list(tensor.shape)}; the model's is {list(shape)}")
            fits = start and tensor.is_floating_point() and place.is_floating_point()
            if tensor.dtype != place.dtype and not fits:
                raise WeightsError(f"{name} is {tensor.dtype}; the server computes in {place.dtype}")
            if not _finite(tensor):
                raise Diverged(f"{name} holds NaN or infinity: these weights have diverged or are damaged")
        unknown = [] if start else [name for name in state if name not in self._places and name not in self._tied]
        if unknown:
            raise WeightsError(f"{unknown[0]} is unknown to the model")

    def free(self) -> None:
        """Free the memory of the places; `fill` takes it again."""
        for place, _ in self._places.values():
            storage = place.untyped_storage()
            if storage.nbytes() and storage.resizable():
                self._freed[storage._cdata] = storage, storage.nbytes()
                storage.resize_(0)

    @torch.no_grad()
    def fill(self, state: Mapping[str, torch.Tensor], *, start: bool = False) -> None:
        """Copy the tensors to their places; see `check`, which comes first, for arguments and errors."""
        self.check(state, start=start)
        while self._freed:
            number, (storage, size) = next(iter(self._freed.items()))
            storage.resize_(size)
            del self._freed[number]
        for name, (place, _) in self._places.items():
            place.copy_(state[name])

    @torch.no_grad()
    def digests(self) -> dict[str, str]:
        """Return name to digest of what is in the places now; one that stands for all rows of a place is read in each.

        Rows that should be equal and are not have no digest of the model's: theirs is that of the whole place.
        """
        found = Digests()
        for name, (place, shape) in self._places.items():
            rows = place.reshape(-1, *shape)
            found.add(name, rows[0] if len(rows) == 1 or bool((rows == rows[0]).all()) else rows)
        return found.result()


def _finite(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    # One pass without a copy: the least and the greatest are NaN if any is, and infinite if any is.
    return bool(torch.stack(torch.aminmax(tensor)).isfinite().all())
