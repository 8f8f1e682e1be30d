"""How many tokens a pass with shared tokens may have: as many as fit into the memory that verl's own engine needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.utils import tensordict_utils  # noqa: TID253  (runs in verl's workers; imported by the engine only)

from agentrig_verl.rows import Row


def tokens_of_a_pass(data: Any, rows: Sequence[Row], room: float) -> int:
    """Return the token budget of a pass.

    With verl's `use_dynamic_bsz` it is `max_token_len_per_gpu`. Otherwise verl's own engine would hold
    `micro_batch_size_per_gpu` padded rows; a pass has `room` times their tokens.

    Args:
        data: A mini-batch with verl's settings.
        rows: All of its rows.
        room: See `room_of`.
    """
    get = tensordict_utils.get_non_tensor_data
    if get(data, "use_dynamic_bsz", True):
        return int(get(data, "max_token_len_per_gpu", None))
    held = int(get(data, "micro_batch_size_per_gpu", None)) * max(row.length for row in rows)
    return int(held * room)


def room_of(config: Any, *, checkpointing: bool) -> float:
    """Return how many tokens fit into the memory that verl's own engine needs for one.

    Both keep each layer's input (with gradient checkpointing) or what each layer needs for its gradient. verl's engine
    also keeps the logits of every token and their gradient; here those of a chunk exist at a time.

    Args:
        config: The model's configuration, of a dense transformer.
        checkpointing: Whether layers are computed again for the gradient.
    """
    width = 2  # bytes of a number in bf16
    layer = width * (8 * config.hidden_size + 4 * config.intermediate_size)
    inputs = width * config.hidden_size * config.num_hidden_layers
    kept: int = inputs + layer if checkpointing else layer * config.num_hidden_layers
    logits: int = 2 * width * config.vocab_size
    return 1 + logits / kept
