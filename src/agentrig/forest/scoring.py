"""Log-probabilities of response tokens under a causal language model."""

from __future__ import annotations

import inspect
from typing import Any

import torch  # noqa: TID253  (only the learner and the warm-up import this module)
from torch.utils.checkpoint import checkpoint  # noqa: TID253

from agentrig.forest.attention import NAME, use
from agentrig.forest.sequences import Batch

SHARING = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Model types whose tokens are shared between samples: their logits are one linear map of the last hidden state, and
their attention is transformers' interface. For others each sample is a row of its own."""

CHUNK = 1 << 26
"""Most logits that are held at once, for the loss; more are computed in chunks, and again for the gradient."""

ENTROPY_ROWS = 1024
"""Tokens whose entropy is computed at once: it takes three times the memory of their logits."""


def shares_tokens(model: Any) -> bool:
    """Return whether tokens can be shared between samples of this model."""
    config = model.config
    sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    replaceable = config._attn_implementation in ("sdpa", NAME)  # another one was asked for by hardware.attention
    return config.model_type in SHARING and not sliding and replaceable


def prepare(model: Any) -> bool:
    """Prepare a model for `score`; return whether tokens are shared between samples."""
    share = shares_tokens(model)
    if share:
        use(model)
    return share


def score(model: Any, batch: Batch, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of a batch's response tokens, and the entropy where each was sampled.

    Args:
        model: A Hugging Face causal language model, perhaps wrapped by peft, after `prepare`.
        batch: On the model's device; with a layout only if `shares_tokens`.
        temperature: The logits are divided by it; 0 counts as 1, as in the server.

    Returns:
        Log-probabilities, fp32 [T], with a gradient; entropy in nats, fp32 [T], without.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not shares_tokens(inner):
        logits = _through_forward(model, inner, batch)[batch.of]
        return token_logprobs(logits, batch.targets, temperature), token_entropy(logits, temperature)
    hidden = inner.get_decoder()(
        input_ids=batch.ids, position_ids=batch.positions, use_cache=False, layout=batch.layout
    ).last_hidden_state.flatten(0, 1)[batch.at]
    head = inner.get_output_embeddings()
    size = max(1, CHUNK // head.weight.shape[0])
    if len(hidden) <= size:
        logits = head(hidden).float()
        return _of_targets(logits, batch.of, batch.targets, temperature), token_entropy(logits, temperature)[batch.of]
    logprobs = torch.empty(len(batch.targets), device=hidden.device)
    entropy = torch.empty(len(hidden), device=hidden.device)

    def part(states: torch.Tensor, of: torch.Tensor, targets: torch.Tensor, start: int) -> torch.Tensor:
        logits = head(states).float()
        if not done[start]:  # not again, when the gradient computes the logits again
            entropy[start : start + len(states)] = token_entropy(logits, temperature)
            done[start] = True
        return _of_targets(logits, of, targets, temperature)

    done = dict.fromkeys(range(0, len(hidden), size), False)
    found, where = [], []
    for start in done:
        places = torch.nonzero((batch.of >= start) & (batch.of < start + size))[:, 0]
        rows = hidden[start : start + size], batch.of[places] - start, batch.targets[places]
        found.append(checkpoint(part, *rows, start, use_reentrant=False))
        where.append(places)
    logprobs = torch.cat(found)[torch.argsort(torch.cat(where))]
    return logprobs, entropy[batch.of]


def _of_targets(logits: torch.Tensor, of: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the log-probabilities of targets, several of which can have the same row of logits."""
    return torch.log_softmax(_tempered(logits, temperature), -1)[of, targets]


def _tempered(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return logits if temperature in (0.0, 1.0) else logits / temperature


def _through_forward(model: Any, inner: Any, batch: Batch) -> torch.Tensor:
    """Return the logits [U, vocabulary] from the model's own forward, for heads that are not one linear map."""
    rows, places = batch.at // batch.ids.shape[1], batch.at % batch.ids.shape[1]
    if "logits_to_keep" not in inspect.signature(inner.forward).parameters:
        every: torch.Tensor = model(input_ids=batch.ids, use_cache=False).logits
        return every[rows, places].float()
    # The logits of a long prompt need too much memory.
    kept, index = places.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    some: torch.Tensor = model(input_ids=batch.ids, use_cache=False, logits_to_keep=kept).logits
    return some[rows, index].float()


def token_logprobs(logits: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Return log softmax(logits / temperature) at the targets, [T]; temperature 0 counts as 1, as in the server."""
    return -torch.nn.functional.cross_entropy(_tempered(logits, temperature), targets, reduction="none")


@torch.no_grad()
def token_entropy(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Return the entropy in nats of softmax(logits / temperature), [T]."""
    found = [torch.zeros(0, device=logits.device)]
    for start in range(0, len(logits), ENTROPY_ROWS):
        part = logits[start : start + ENTROPY_ROWS]
        logp = torch.log_softmax(_tempered(part, temperature), -1)
        found.append(-(logp.exp() * logp).sum(-1))
    return torch.cat(found)
