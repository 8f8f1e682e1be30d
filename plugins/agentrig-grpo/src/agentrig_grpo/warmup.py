"""Supervised training on completions without a run, for scripts that make models to ship."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch  # noqa: TID253  (imported when a starting model is made only)
from agentrig_forest.scoring import prepare, score
from agentrig_forest.sequences import collate, packed

log_lines = logging.getLogger(__name__)

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.01
"""AdamW's, on matrices only."""
GRAD_NORM = 1.0
"""The gradient is clipped to this L2 norm."""
WARMUP = 0.03
"""Share of the steps over which the learning rate rises."""


@attrs.frozen
class Example:
    """A prompt and the completion to learn, as token ids.

    Attributes:
        prompt_ids: Chat template applied, the generation prompt included.
        response_ids: With the end-of-turn token.
    """

    prompt_ids: tuple[int, ...] = attrs.field(converter=tuple)
    response_ids: tuple[int, ...] = attrs.field(converter=tuple)


@attrs.frozen(kw_only=True)
class FineTuneStats:
    """What a warm-up did.

    Attributes:
        steps: Optimizer steps.
        tokens: Tokens that went through the model, shared prompts counted once, padding not counted.
        completion_tokens: Tokens that the loss was taken on.
        losses: Mean loss per completion token in nats, one an epoch.
        wall_s: Seconds.
    """

    steps: int
    tokens: int
    completion_tokens: int
    losses: Sequence[float]
    wall_s: float


def new_model(config: Any, tokenizer: Any, *, seed: int) -> Any:
    """Return a model with random weights, its special tokens taken from the tokenizer.

    Args:
        config: A `transformers` configuration.
        tokenizer: Its vocabulary must fit into the configuration's.

    Raises:
        ValueError: The vocabulary is larger than the configuration's `vocab_size`.
    """
    import transformers

    library: Any = transformers
    if len(tokenizer) > config.vocab_size:
        raise ValueError(f"the tokenizer has {len(tokenizer)} tokens, the model's vocab_size is {config.vocab_size}")
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    config.bos_token_id = tokenizer.bos_token_id
    torch.manual_seed(seed)
    model = library.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = library.GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id
    )
    return model


def fine_tune(
    model: Any,
    examples: Sequence[Example],
    *,
    epochs: float = 1.0,
    lr: float = 2e-3,
    tokens_per_batch: int = 8192,
    seed: int = 0,
    device: str = "cpu",
    log: Callable[[str], None] | None = log_lines.info,
) -> FineTuneStats:
    """Train on completions by cross-entropy, in place, with AdamW and a cosine schedule, until the loss is not finite.

    Args:
        model: A Hugging Face causal language model; its weights stay fp32.
        epochs: Passes over the data; fractions are allowed.
        lr: Greatest learning rate; rises linearly over the first `WARMUP` of the steps, then falls to a
            tenth along a cosine.
        tokens_per_batch: Tokens of one optimizer step, padding counted.
        seed: Of the order of the data.
        log: Called with a progress line about every five seconds; None for no output.

    Raises:
        ValueError: No examples.
    """
    if not examples:
        raise ValueError("there are no examples to warm up on")
    torch_device = torch.device(device)
    model.to(torch_device).train()
    optimizer = torch.optim.AdamW(_parameter_groups(model), lr=lr, betas=BETAS, fused=True)
    parameters = [p for p in model.parameters() if p.requires_grad]
    share = prepare(model)
    schedule = _epochs(examples, epochs, tokens_per_batch, seed, share=share)
    total = sum(len(batches) for batches in schedule)
    steps = tokens = completion_tokens = 0
    losses = []
    start = said = time.perf_counter()
    for epoch in schedule:
        # The sum stays on the device: reading it at each step would make the host wait.
        epoch_loss, epoch_tokens = torch.zeros((), dtype=torch.float64, device=torch_device), 0
        for pack in epoch:
            factor = _cosine(steps / total)
            for group in optimizer.param_groups:
                group["lr"] = lr * factor
            batch = collate(pack, share=share).to(torch_device)
            loss = -score(model, batch)[0].mean()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(parameters, GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            steps += 1
            tokens += batch.computed
            epoch_loss += loss.detach() * len(batch.targets)
            epoch_tokens += len(batch.targets)
            now = time.perf_counter()
            if log is not None and (now - said > 5 or steps == total):
                said = now
                rate = tokens / (now - start)
                log(f"step {steps}/{total} loss {float(epoch_loss) / epoch_tokens:.4f} {rate:.0f} tokens/s")
        losses.append(float(epoch_loss) / epoch_tokens)
        completion_tokens += epoch_tokens
        if not math.isfinite(losses[-1]):
            break  # the weights are lost
    model.eval()
    return FineTuneStats(
        steps=steps,
        tokens=tokens,
        completion_tokens=completion_tokens,
        losses=losses,
        wall_s=time.perf_counter() - start,
    )


def _epochs(items: Sequence[Example], epochs: float, budget: int, seed: int, *, share: bool) -> list[list[Any]]:
    """Return the batches of each epoch: rows of similar length together, batches in random order."""
    rng = random.Random(seed)
    schedule = []
    left = epochs
    while left > 0:
        chosen = list(items)
        rng.shuffle(chosen)
        chosen = chosen[: max(1, round(len(chosen) * min(left, 1.0)))]
        # Sorting within chunks of a few batches keeps padding small and the order random.
        size = max(1, 16 * budget // max(1, sum(len(e.prompt_ids) + len(e.response_ids) for e in items) // len(items)))
        batches: list[Any] = []
        for begin in range(0, len(chosen), size):
            batches += packed(chosen[begin : begin + size], budget, share=share)
        rng.shuffle(batches)
        schedule.append(batches)
        left -= 1
    return schedule


def _cosine(progress: float) -> float:
    if progress < WARMUP:
        return max(progress / WARMUP, 0.01)
    along = (progress - WARMUP) / (1 - WARMUP)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(along, 1.0)))


def _parameter_groups(model: Any) -> list[dict[str, Any]]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
