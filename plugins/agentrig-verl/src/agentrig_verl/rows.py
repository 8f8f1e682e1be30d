"""The rows of verl's ragged batches as samples of a forest, and per-token results back in verl's layout."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch  # noqa: TID253  (runs in verl's workers; imported by the engine only)
from agentrig_forest.sequences import Batch


@attrs.frozen(kw_only=True, eq=False)
class Row:
    """A row of verl's batch, up to its last trained token: nothing after it has an effect.

    Attributes:
        index: Its index in the batch.
        prompt_ids: Token ids, at least one.
        response_ids: Token ids up to the last trained one; empty when the row has none.
        trained: Which of `response_ids` are trained, [len(response_ids)].
        length: All tokens of verl's row.
    """

    index: int
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    trained: npt.NDArray[np.bool_]
    length: int

    @property
    def traced(self) -> int:
        """Number of tokens to compute if nothing is shared; 0 for a row without a trained token."""
        return self.length - 1 if self.response_ids else 0


def rows_of(data: Any) -> list[Row]:
    """Return the rows of a batch.

    Args:
        data: With the ragged fields `input_ids`, `position_ids`, `prompts` and `response_mask`.

    Raises:
        ValueError: A row's positions are not 0, 1, 2, …, or its prompt is empty.
    """
    starts = data["input_ids"].offsets().tolist()
    ids = data["input_ids"].values().tolist()
    positions = data["position_ids"].values().cpu().numpy()
    prompts = data["prompts"].offsets().diff().tolist()
    masks = data["response_mask"].offsets().tolist()
    mask = data["response_mask"].values().bool().cpu().numpy()
    found = []
    for i, prompt in enumerate(prompts):
        begin, end = starts[i], starts[i + 1]
        if not prompt or not np.array_equal(positions[begin:end], np.arange(end - begin)):
            raise ValueError(f"row {i} has {prompt} prompt tokens and positions that don't count from 0 to its end")
        trained = mask[masks[i] : masks[i + 1]]
        used = int(np.flatnonzero(trained)[-1]) + 1 if trained.any() else 0
        found.append(
            Row(
                index=i,
                prompt_ids=ids[begin : begin + prompt],
                response_ids=ids[begin + prompt : begin + prompt + used],
                trained=trained[:used],
                length=end - begin,
            )
        )
    return found


def without_gradient(rows: Sequence[Row], data: Any) -> list[Row]:
    """Return rows whose advantages are all 0 without a token to compute, and the others as they are.

    Args:
        data: With the ragged field `advantages`.
    """
    advantages = data["advantages"]
    starts, nonzero = advantages.offsets().tolist(), (advantages.values() != 0).cpu().numpy()
    some = [bool(nonzero[a:b].any()) for a, b in pairwise(starts)]
    nothing = np.zeros(0, dtype=bool)
    return [
        row if active else attrs.evolve(row, response_ids=(), trained=nothing)
        for row, active in zip(rows, some, strict=True)
    ]


def trained_only(batch: Batch, rows: Sequence[Row]) -> Batch:
    """Return a batch without the tokens that are in no loss, for example those of a tool's answer.

    Args:
        batch: A batch on the CPU.
        rows: The samples of its forest.
    """
    starts = torch.tensor([0, *np.cumsum([len(row.trained) for row in rows])])
    trained = torch.from_numpy(np.concatenate([row.trained for row in rows]))
    kept = trained[starts[batch.sample] + batch.place]
    return batch if bool(kept.all()) else batch.only(kept)


def places_of(batch: Batch, samples: Sequence[Row], members: Sequence[Row]) -> torch.Tensor:
    """Return where verl expects each log-probability of a batch: at the token before the predicted one.

    Args:
        samples: The samples of its forest.
        members: The rows of the micro-batch, in its order.

    Returns:
        Index into the concatenated tokens of all members, [T]; 0 for a sample that is not one of them.
    """
    starts = np.cumsum([0, *(row.length for row in members)])
    first = {row.index: int(start) + len(row.prompt_ids) - 1 for row, start in zip(members, starts, strict=False)}
    table = torch.tensor([first.get(row.index, 0) for row in samples], device=batch.sample.device)
    return table[batch.sample] + batch.place


def by_row(found: torch.Tensor, places: torch.Tensor, like: Any, elsewhere: torch.Tensor | None = None) -> torch.Tensor:
    """Return per-token results in verl's layout.

    Args:
        found: Results, [T].
        places: See `places_of`.
        like: A ragged tensor with the tokens of the micro-batch.
        elsewhere: The value of tokens without a result, one row after the other; None for 0.
    """
    base = found.new_zeros(like.values().shape[0]) if elsewhere is None else elsewhere
    return torch.nested.nested_tensor_from_jagged(base.index_copy(0, places, found), like.offsets())


def old_logprobs(micro: Any, members: Sequence[Row]) -> torch.Tensor:
    """Return verl's `old_log_probs` of rows that are not computed, where `by_row` has the others; fp32 [tokens].

    With them the ratio of these rows is 1, as it is for a policy that has not changed.

    Args:
        micro: The rows of a micro-batch.
        members: The same rows, in its order.
    """
    old = micro["old_log_probs"]
    found = torch.zeros(micro["input_ids"].values().shape[0], device=old.device)
    start = 0
    for row, values in zip(members, old.unbind(), strict=True):
        if not row.response_ids:
            first = start + len(row.prompt_ids) - 1
            found[first : first + len(values)] = values
        start += row.length
    return found
