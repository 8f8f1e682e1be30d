"""Token batches: samples are packed so that a prompt shared by a group is computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import attrs
import torch  # noqa: TID253  (only the learner and the warm-up import this module)

ROW_LIMIT = 4096
"""Longest row, in tokens, that sharing a prompt may make: attention within a row is quadratic."""


class Sample(Protocol):
    """A prompt and its response to train on (an `agentrig.Triplet` is one)."""

    @property
    def prompt_ids(self) -> Sequence[int]:
        """Token ids of the prompt."""
        ...

    @property
    def response_ids(self) -> Sequence[int]:
        """Token ids of the response, at least one."""
        ...


@attrs.frozen(kw_only=True)
class Row:
    """One prompt and the responses to it, laid side by side.

    Attributes:
        prompt: Token ids.
        responses: Token ids of each response.
        samples: Which sample each response belongs to.
    """

    prompt: tuple[int, ...]
    responses: tuple[tuple[int, ...], ...]
    samples: tuple[int, ...]

    @property
    def length(self) -> int:
        """How many tokens the row holds."""
        return len(self.prompt) + sum(map(len, self.responses))


@attrs.frozen(kw_only=True)
class Batch:
    """Rows as tensors, padded on the right; T is the number of response tokens in all rows.

    Attributes:
        ids: Token ids, [rows, length].
        positions: Position of each token in its own prompt + response, [rows, length].
        mask: None when plain causal attention is right, else a float mask [rows, 1, length, length]
            that adds 0 where a token may look and a very negative number elsewhere.
        at: Index into the flattened [rows * length] hidden states that predict response tokens, [T].
        targets: The response tokens, [T].
        sample: Which sample each response token belongs to, [T], ascending within one response.
        place: Which token of its response each is, [T].
    """

    ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor | None
    at: torch.Tensor
    targets: torch.Tensor
    sample: torch.Tensor
    place: torch.Tensor


def rows_of(samples: Sequence[Sample], *, share: bool = True, limit: int = ROW_LIMIT) -> list[Row]:
    """Pack samples into rows: samples with the same prompt share a row of at most `limit` tokens.

    Raises:
        ValueError: A sample has an empty prompt or response.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, sample in enumerate(samples):
        prompt = tuple(sample.prompt_ids)
        if not prompt or not sample.response_ids:
            raise ValueError(f"sample {i} has {len(prompt)} prompt and {len(sample.response_ids)} response tokens")
        groups.setdefault(prompt, []).append(i)
    rows = []
    for prompt, members in groups.items():
        held: list[int] = []
        length = len(prompt)
        for i in members:
            more = len(samples[i].response_ids)
            if held and (not share or length + more > limit):
                rows.append(_row(prompt, held, samples))
                held, length = [], len(prompt)
            held.append(i)
            length += more
        rows.append(_row(prompt, held, samples))
    return rows


def _row(prompt: tuple[int, ...], members: Sequence[int], samples: Sequence[Sample]) -> Row:
    responses = tuple(tuple(samples[i].response_ids) for i in members)
    return Row(prompt=prompt, responses=responses, samples=tuple(members))


def batches_of(rows: Sequence[Row], tokens_per_batch: int) -> Iterator[list[Row]]:
    """Split rows, sorted by length, into batches of at most that many tokens, padding included.

    A row that is longer than the budget makes a batch of its own.
    """
    batch: list[Row] = []
    for row in sorted(rows, key=lambda r: -r.length):
        if batch and (len(batch) + 1) * batch[0].length > tokens_per_batch:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def collate(rows: Sequence[Row], *, pad: int = 0) -> Batch:
    """Turn rows into tensors on the CPU.

    A response attends to its prompt and to its own earlier tokens, never to another response beside
    it, so the numbers are those of separate sequences.
    """
    length = max(row.length for row in rows)
    ids = torch.full((len(rows), length), pad)
    positions = torch.arange(length).repeat(len(rows), 1)
    shared = any(len(row.responses) > 1 for row in rows)
    mask = None
    if shared:
        mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1).repeat(len(rows), 1, 1, 1)
    at: list[int] = []
    targets: list[int] = []
    sample: list[int] = []
    place: list[int] = []
    for r, row in enumerate(rows):
        prompt = len(row.prompt)
        flat = [*row.prompt, *(t for response in row.responses for t in response)]
        ids[r, : len(flat)] = torch.tensor(flat)
        start = prompt
        for response, i in zip(row.responses, row.samples, strict=True):
            end = start + len(response)
            positions[r, start:end] = torch.arange(prompt, prompt + len(response))
            if mask is not None:
                mask[r, 0, start:end, prompt:start] = torch.finfo(torch.float32).min
            # The prompt's last token predicts the first of every response.
            at += [r * length + prompt - 1, *range(r * length + start, r * length + end - 1)]
            targets += response
            sample += [i] * len(response)
            place += range(len(response))
            start = end
    return Batch(
        ids=ids,
        positions=positions,
        mask=mask,
        at=torch.tensor(at),
        targets=torch.tensor(targets),
        sample=torch.tensor(sample),
        place=torch.tensor(place),
    )
