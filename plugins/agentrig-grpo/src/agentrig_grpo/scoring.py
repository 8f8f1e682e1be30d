"""Log-probabilities of response tokens under a causal language model."""

from __future__ import annotations

import inspect
from typing import Any

import torch  # noqa: TID253  (only the learner and the warm-up import this module)

from agentrig_grpo.sequences import Batch

PLAIN_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Model types whose logits are one linear map of the last hidden state and whose attention takes a
custom mask; for others prompts are not shared and all logits are computed."""


ENTROPY_ROWS = 1024
"""Tokens whose entropy is computed at once: it takes three times the memory of their logits."""


def shares_prompts(model: Any) -> bool:
    """Return whether a model accepts rows with several responses to one prompt."""
    config = model.config
    sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return config.model_type in PLAIN_FAMILIES and not sliding


def response_logits(model: Any, batch: Batch) -> torch.Tensor:
    """Return the logits that predict the response tokens of a batch.

    Args:
        model: A Hugging Face causal language model, perhaps wrapped by peft.
        batch: On the model's device; without a mask unless `shares_prompts(model)`.

    Returns:
        fp32 logits [T, vocabulary]; only these positions go through the output layer.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not shares_prompts(inner):
        return _through_forward(model, inner, batch)
    mask = None if batch.mask is None else batch.mask.to(_attention_dtype(inner))
    hidden = inner.get_decoder()(
        input_ids=batch.ids, position_ids=batch.positions, attention_mask=mask, use_cache=False
    ).last_hidden_state
    logits: torch.Tensor = inner.get_output_embeddings()(hidden.flatten(0, 1)[batch.at])
    return logits.float()


def _through_forward(model: Any, inner: Any, batch: Batch) -> torch.Tensor:
    """Return the same logits from the model's own forward, for heads that are not one linear map."""
    rows, places = batch.at // batch.ids.shape[1], batch.at % batch.ids.shape[1]
    if "logits_to_keep" not in inspect.signature(inner.forward).parameters:
        every: torch.Tensor = model(input_ids=batch.ids, use_cache=False).logits
        return every[rows, places].float()
    # The logits of a long prompt need too much memory.
    kept, index = places.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    some: torch.Tensor = model(input_ids=batch.ids, use_cache=False, logits_to_keep=kept).logits
    return some[rows, index].float()


def _attention_dtype(model: Any) -> torch.dtype:
    weight: torch.Tensor = next(model.parameters())
    if torch.is_autocast_enabled(weight.device.type):
        return torch.get_autocast_dtype(weight.device.type)
    return weight.dtype


def token_logprobs(logits: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Return log softmax(logits / temperature) at the targets, [T]; temperature 0 counts as 1, as in the server."""
    if temperature not in (0.0, 1.0):
        logits = logits / temperature
    return -torch.nn.functional.cross_entropy(logits, targets, reduction="none")


@torch.no_grad()
def token_entropy(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Return the entropy in nats of softmax(logits / temperature), [T]."""
    found = [torch.zeros(0, device=logits.device)]
    for start in range(0, len(logits), ENTROPY_ROWS):
        part = logits[start : start + ENTROPY_ROWS]
        logp = torch.log_softmax(part if temperature in (0.0, 1.0) else part / temperature, -1)
        found.append(-(logp.exp() * logp).sum(-1))
    return torch.cat(found)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return the batch with its tensors on a device; asynchronously on a GPU."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        # Only copies from pinned memory are asynchronous; others wait for all earlier work.
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

    return Batch(
        ids=moved(batch.ids),
        positions=moved(batch.positions),
        mask=None if batch.mask is None else moved(batch.mask),
        at=moved(batch.at),
        targets=moved(batch.targets),
        sample=moved(batch.sample),
        place=moved(batch.place),
    )
