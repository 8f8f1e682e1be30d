"""From a group's rollouts to verl's trajectories: what goes into TransferQueue under which key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from agentrig.credit import CallWorth
from agentrig.ledger import Call
from agentrig.rollouts import Rollout
from agentrig_verl.merge import Segment, merge, segment_of

if TYPE_CHECKING:
    import torch

PARTITION = "train"
"""verl's partition for what is trained on."""


@attrs.frozen(kw_only=True)
class Trajectory:
    """One sequence to train on.

    Attributes:
        key: `{uid}_{session}_{index}`, as verl parses it.
        fields: What verl's trainer reads, by name; see `fields_of`.
        tags: What it sorts, balances and counts by.
        pieces: Its calls: each with the place of its first token among the responses, and its number of tokens.
        checksum: Of its token ids (`agentrig_verl.counted`), once the manager has put it into TransferQueue.
    """

    key: str
    fields: dict[str, Any] = attrs.field(repr=False)
    tags: dict[str, Any]
    pieces: tuple[tuple[Call, int, int], ...] = ()
    checksum: int = 0


def trajectories_of(rollouts: Sequence[Rollout], *, uid: str, step: int, merged: bool = True) -> list[Trajectory]:
    """Return the trajectories of one group.

    Args:
        rollouts: The n rollouts of one task; their places are the session ids.
        uid: verl's id of the group; must not contain `_`.
        step: The training step; also the version of the weights that sampled.
        merged: Whether calls that extend one another become one sequence.

    Returns:
        None of a failed rollout; else one for each sequence, indices from 0.
    """
    segments = [merge(r.triplets) if merged else [segment_of(t) for t in r.triplets] for r in rollouts]
    found = []
    for session, (rollout, parts) in enumerate(zip(rollouts, segments, strict=True)):
        if rollout.value is None:
            continue
        for index, segment in enumerate(parts):
            found.append(
                Trajectory(
                    key=f"{uid}_{session}_{index}",
                    fields=fields_of(segment, rollout, uid=uid, session=session, step=step),
                    tags=tags_of(segment, step=step),
                    pieces=tuple((Call(rollout.id, span), start, n) for span, start, n in segment.pieces),
                )
            )
    return found


def fields_of(segment: Segment, rollout: Rollout, *, uid: str, session: int, step: int) -> dict[str, Any]:
    """Return a trajectory's fields: 1-D tensors without padding, of the prompt, the response or both.

    `rm_scores` holds the rollout's value on the last token of each of its sequences: verl's own
    figures (critic/score) then read as expected. Advantages come later, from the run's credit: `advantages_of`.
    """
    import torch

    prompts = torch.tensor(segment.prompt_ids, dtype=torch.int64)
    responses = torch.tensor(segment.response_ids, dtype=torch.int64)
    mask = torch.tensor(segment.mask, dtype=torch.int64)
    input_ids = torch.cat([prompts, responses])
    scores = torch.zeros(len(responses), dtype=torch.float32)
    scores[-1] = float(rollout.value or 0.0)
    fields: dict[str, Any] = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": mask,
        "loss_mask": mask,
        "input_ids": input_ids,
        "position_ids": torch.arange(len(input_ids), dtype=torch.int64),
        "rm_scores": scores,
        "multi_modal_inputs": {},
        "num_turns": len(segment.pieces),
        "uid": uid,
        "session_id": session,
        "data_source": "agentrig",
        "task_id": rollout.task.id,
        "rollout_id": rollout.id,
        "global_steps": step,
    }
    if segment.logprobs is not None:
        fields["rollout_log_probs"] = torch.tensor(segment.logprobs, dtype=torch.float32)
    return fields


def tags_of(segment: Segment, *, step: int) -> dict[str, Any]:
    """Return a trajectory's tags; the weights of step `step` are version `step - 1`."""
    prompt, response = len(segment.prompt_ids), len(segment.response_ids)
    return {
        "status": "success",
        "prompt_len": prompt,
        "response_len": response,
        "seq_len": prompt + response,
        "global_steps": step,
        "min_global_steps": step - 1,
        "max_global_steps": step - 1,
    }


def advantages_of(
    trajectory: Trajectory | None, worths: Mapping[Call, CallWorth], mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a row's advantages, and its mask without the calls that the credit leaves out.

    Args:
        trajectory: The row's trajectory; None for one that verl added to fill a mini-batch.
        worths: What each call of the step, or each of its tokens, is worth; None for one that is left out.
        mask: verl's `response_mask`, [response tokens].
    """
    import torch

    advantages, kept = torch.zeros(mask.shape, dtype=torch.float32), mask.clone()
    for call, start, length in trajectory.pieces if trajectory is not None else ():
        worth = worths[call]
        advantages[start : start + length] = torch.tensor(0.0 if worth is None else worth)
        if worth is None:
            kept[start : start + length] = 0
    return advantages * kept, kept


def in_task_order(keys: Sequence[str], trajectories: Iterable[str]) -> list[int]:
    """Return the order that puts a batch's rows as the step's tasks are, whichever group was complete first.

    verl gets groups as they are complete. Mini-batches, and so the new weights, would depend on that.

    Args:
        keys: Of the batch's rows.
        trajectories: The keys of the step's trajectories in the order of its tasks.

    Returns:
        The rows' places in the batch; rows that are no trajectories come last.
    """
    places = {key: i for i, key in enumerate(trajectories)}
    return sorted(range(len(keys)), key=lambda i: places.get(keys[i], len(places)))


def in_chunks(items: Sequence[Trajectory], tokens: int = 2_000_000) -> Iterator[list[Trajectory]]:
    """Cut trajectories into batches of bounded size for TransferQueue."""
    chunk: list[Trajectory] = []
    held = 0
    for item in items:
        if chunk and held + item.tags["seq_len"] > tokens:
            yield chunk
            chunk, held = [], 0
        chunk.append(item)
        held += item.tags["seq_len"]
    if chunk:
        yield chunk
