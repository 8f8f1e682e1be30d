"""Log-probabilities of response tokens under a causal language model."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from agentrig_forest.attention import NAME, use
from agentrig_forest.head import fits, logprobs
from agentrig_forest.sequences import Batch

SHARING = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Model types whose tokens are shared between samples: their logits are one linear map of the last hidden state, and
they use transformers' attention interface. For other types each sample is a separate row."""

CHUNK = 1 << 26
"""Most logits in memory at once; more are computed in chunks, and computed again for the gradient."""

ENTROPY_ROWS = 1024
"""Tokens whose entropy is computed at once: it takes twice the memory of their logits."""


def shares_tokens(model: Any) -> bool:
    """Return whether tokens can be shared between samples of this model."""
    return not why_not_shared(model)


def why_not_shared(model: Any) -> str:
    """Return why tokens cannot be shared between samples of this model; an empty string if they can."""
    config = model.config
    if config.model_type not in SHARING:
        return f"models of type {config.model_type} are not among {', '.join(sorted(SHARING))}"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return f"the model's attention sees the last {config.sliding_window} tokens only (sliding_window)"
    if config._attn_implementation not in ("sdpa", NAME):  # hardware.attention selects others
        return f"the attention is {config._attn_implementation} (hardware.attention), and sharing needs sdpa"
    return ""


def prepare(model: Any) -> bool:
    """Prepare a model for `score`; return whether tokens are shared between samples."""
    share = shares_tokens(model)
    if share:
        use(model)
    return share


def score(
    model: Any, batch: Batch, temperature: float = 1.0, *, chunk: int | None = None, entropy_gradient: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability of each response token of a batch, and the entropy of its distribution.

    Args:
        model: A Hugging Face causal language model after `prepare`; peft may wrap it.
        batch: A batch on the model's device; it has a layout only if `shares_tokens`.
        temperature: The logits are divided by it; 0 counts as 1, as in the server.
        chunk: Most logits that are held at once; None for `CHUNK`.
        entropy_gradient: Give the entropy a gradient too; only for a batch with a layout.

    Returns:
        Log-probabilities, fp32 [T], with a gradient; entropy in nats, fp32 [T].
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not shares_tokens(inner):
        logits = _through_forward(model, inner, batch)[batch.of]
        return token_logprobs(logits, batch.targets, temperature), token_entropy(logits, temperature)
    hidden = inner.get_decoder()(
        input_ids=batch.ids, position_ids=batch.positions, use_cache=False, layout=batch.layout
    ).last_hidden_state.flatten(0, 1)[batch.at]
    head = inner.get_output_embeddings()
    size = max(1, (chunk or CHUNK) // head.weight.shape[0])
    if fits(head, hidden) and not entropy_gradient:
        states = hidden if len(batch.of) == len(hidden) else hidden.index_select(0, batch.of)
        return logprobs(states, head.weight, batch.targets, temperature or 1.0, size)
    entropy = torch.empty(len(hidden), device=hidden.device)

    def both(states: torch.Tensor, of: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logp = torch.log_softmax(_tempered(head(states).float(), temperature), -1)
        return logp[of, targets], -(logp.exp() * logp).sum(-1)

    def part(states: torch.Tensor, of: torch.Tensor, targets: torch.Tensor, start: int) -> torch.Tensor:
        logp = torch.log_softmax(_tempered(head(states).float(), temperature), -1)
        if not done[start]:  # only once: the backward pass computes the logits again
            entropy[start : start + len(states)] = _entropy(logp)
            done[start] = True
        return logp[of, targets]

    done = dict.fromkeys(range(0, len(hidden), size), False)
    if entropy_gradient:
        pairs = [
            checkpoint(both, hidden[a : a + size], batch.of[low:high] - a, batch.targets[low:high], use_reentrant=False)
            for a, low, high in _chunks(batch.of, len(hidden), size)
        ]
        return torch.cat([logprobs for logprobs, _ in pairs]), torch.cat([found for _, found in pairs])[batch.of]
    if len(done) == 1:
        return part(hidden, batch.of, batch.targets, 0), entropy[batch.of]
    found = []
    for start, low, high in _chunks(batch.of, len(hidden), size):
        rows = hidden[start : start + size], batch.of[low:high] - start, batch.targets[low:high]
        found.append(checkpoint(part, *rows, start, use_reentrant=False))
    return torch.cat(found), entropy[batch.of]


def _chunks(of: torch.Tensor, states: int, size: int) -> list[tuple[int, int, int]]:
    """Return where each chunk of hidden states begins, and its first target and the one after its last."""
    starts = [*range(0, states, size), states]
    # If no two targets share a hidden state, their indices are equal, and nothing is read from the device.
    places = starts if len(of) == states else torch.searchsorted(of, torch.tensor(starts, device=of.device)).tolist()
    return list(zip(starts[:-1], places[:-1], places[1:], strict=True))


def _tempered(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return logits if temperature in (0.0, 1.0) else logits / temperature


def _through_forward(model: Any, inner: Any, batch: Batch) -> torch.Tensor:
    """Return the logits [U, vocabulary] from the model's own forward, for output heads that are not one linear map."""
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


def token_entropy(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Return the entropy in nats of softmax(logits / temperature), [T]."""
    rows = torch.split(logits.detach(), ENTROPY_ROWS)
    return torch.cat([_entropy(torch.log_softmax(_tempered(part, temperature), -1)) for part in rows])


@torch.no_grad()
def _entropy(logp: torch.Tensor) -> torch.Tensor:
    """Return the entropy in nats of log-probabilities, [T, vocabulary] to [T]."""
    return torch.cat([-(part.exp() * part).sum(-1) for part in torch.split(logp, ENTROPY_ROWS)])
