"""Supervised warm-up: trains a model on completions, from random weights or from a checkpoint.

As a command:
    python -m agentrig_grpo.warmup --model-config CONFIG_DIR --data file.jsonl --out DIR
where every line of the data is `{"messages": [...], "completion": "text"}` or
`{"prompt_ids": [...], "completion_ids": [...]}`.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch  # noqa: TID253  (this module is a command of its own, or imported by one)

from agentrig.forest.scoring import prepare, score
from agentrig.forest.sequences import Batch, collate, packed
from agentrig_grpo import checkpoint

log_lines = logging.getLogger(__name__)


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

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second."""
        return self.tokens / self.wall_s if self.wall_s else 0.0


def encode(tokenizer: Any, example: Mapping[str, Any]) -> Example:
    """Turn one line of data into token ids.

    Args:
        tokenizer: With a chat template.
        example: `{"messages": [{"role", "content"}, …], "completion": str}`, whose completion is
            ended by the tokenizer's end-of-sequence token, or `{"prompt_ids", "completion_ids"}`,
            taken as they are.

    Raises:
        ValueError: It has neither form.
    """
    if "prompt_ids" in example and "completion_ids" in example:
        return Example(example["prompt_ids"], example["completion_ids"])
    if not isinstance(example.get("messages"), list) or not isinstance(example.get("completion"), str):
        raise ValueError(
            f"an example needs messages and completion, or prompt_ids and completion_ids; this has {sorted(example)}"
        )
    text = tokenizer.apply_chat_template(example["messages"], add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    completion = tokenizer(example["completion"], add_special_tokens=False)["input_ids"]
    return Example(prompt, [*completion, tokenizer.eos_token_id])


def new_model(config: Any, tokenizer: Any, *, seed: int) -> Any:
    """Return a model with random weights, its special tokens taken from the tokenizer.

    Args:
        config: A `transformers` configuration, or a directory or file (`config.json`) that holds one.
        tokenizer: Its vocabulary must fit into the configuration's.
        seed: Of the initial weights.

    Raises:
        ValueError: The vocabulary is larger than the configuration's `vocab_size`.
    """
    import transformers

    library: Any = transformers

    if isinstance(config, str | Path):
        config = library.AutoConfig.from_pretrained(str(config), local_files_only=True)
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
    tokenizer: Any,
    examples: Iterable[Mapping[str, Any] | Example],
    *,
    epochs: float = 1.0,
    lr: float = 2e-3,
    tokens_per_batch: int = 8192,
    seed: int = 0,
    device: str = "cpu",
    dtype: str = "float32",
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.01,
    max_grad_norm: float = 1.0,
    warmup_share: float = 0.03,
    max_seconds: float = math.inf,
    enough: Callable[[], bool] | None = None,
    log: Callable[[str], None] | None = log_lines.info,
) -> FineTuneStats:
    """Train on completions by cross-entropy, in place, with AdamW and a cosine schedule.

    Args:
        model: A Hugging Face causal language model; its weights stay fp32.
        tokenizer: Only used for examples that are text.
        examples: See `encode`; read once and kept in memory as token ids.
        epochs: Passes over the data; fractions are allowed.
        lr: Greatest learning rate; rises linearly over `warmup_share` of the steps, then falls to a
            tenth along a cosine.
        tokens_per_batch: Tokens of one optimizer step, padding counted.
        seed: Of the order of the data.
        device: `cpu`, `cuda`, ….
        dtype: `float32` or `bfloat16` (then the forward pass runs under autocast).
        betas: AdamW's.
        weight_decay: AdamW's, on matrices only.
        max_grad_norm: The gradient is clipped to this L2 norm.
        warmup_share: Share of the steps over which the learning rate rises.
        max_seconds: Stop early after this much wall time. When that is what ends the training, the schedule
            follows the time, so that the learning rate still decays to its end; else it follows the steps alone, and
            a seed gives the same model again.
        enough: Called between two epochs, from half of them on, with the model in `eval` mode: True ends the
            training. Its time does not count.
        log: Called with a progress line about every five seconds; None for no output.

    Returns:
        Counts, losses and wall time.

    Raises:
        ValueError: No examples, or a dtype that is neither of the two.
    """
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype is {dtype!r}; use float32 or bfloat16")
    items = [e if isinstance(e, Example) else encode(tokenizer, e) for e in examples]
    if not items:
        raise ValueError("there are no examples to warm up on")
    torch_device = torch.device(device)
    model.to(torch_device).train()
    optimizer = torch.optim.AdamW(_parameter_groups(model, weight_decay), lr=lr, betas=betas, fused=True)
    parameters = [p for p in model.parameters() if p.requires_grad]
    share = prepare(model)
    schedule = _epochs(items, epochs, tokens_per_batch, seed, share=share)
    total = sum(len(batches) for batches in schedule)
    steps = tokens = completion_tokens = 0
    losses = []
    start = said = time.perf_counter()
    for number, epoch in enumerate(schedule):
        if time.perf_counter() - start > max_seconds:
            break
        if enough is not None and 2 * number >= len(schedule) > 1:
            asked = time.perf_counter()
            model.eval()
            if enough():
                break
            model.train()
            start += time.perf_counter() - asked
        # The sum stays on the device: reading it at each step would make the host wait.
        epoch_loss, epoch_tokens = torch.zeros((), dtype=torch.float64, device=torch_device), 0
        for pack in epoch:
            elapsed = time.perf_counter() - start
            if elapsed > max_seconds:
                break
            factor = _cosine(_progress(steps, total, elapsed, max_seconds), warmup_share)
            for group in optimizer.param_groups:
                group["lr"] = lr * factor
            batch = collate(pack, share=share).to(torch_device)
            loss = _loss(model, batch, dtype)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
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
        if epoch_tokens:
            losses.append(float(epoch_loss) / epoch_tokens)
            completion_tokens += epoch_tokens
    model.eval()
    return FineTuneStats(
        steps=steps,
        tokens=tokens,
        completion_tokens=completion_tokens,
        losses=losses,
        wall_s=time.perf_counter() - start,
    )


def _loss(model: Any, batch: Batch, dtype: str) -> torch.Tensor:
    device = batch.ids.device.type
    with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
        return -score(model, batch)[0].mean()


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


def _progress(steps: int, total: int, elapsed: float, max_seconds: float) -> float:
    """Return the share of the training that is done, by steps, or by time if the time will end it first."""
    if steps < total / 20 or elapsed / steps * total <= max_seconds:
        return steps / total  # the first steps take longer than others: they say nothing about the rest
    return max(steps / total, elapsed / max_seconds)


def _cosine(progress: float, warmup_share: float) -> float:
    if progress < warmup_share:
        return max(progress / warmup_share, 0.01)
    along = (progress - warmup_share) / max(1 - warmup_share, 1e-9)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(along, 1.0)))


def _parameter_groups(model: Any, weight_decay: float) -> list[dict[str, Any]]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def read_examples(path: Path) -> list[dict[str, Any]]:
    """Read a JSONL file.

    Raises:
        ValueError: A line is not a JSON object; says which.
    """
    examples = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise ValueError(f"{path}, line {number} is not a JSON object")
        examples.append(value)
    return examples


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; see the module's first lines."""
    parser = argparse.ArgumentParser(prog="python -m agentrig_grpo.warmup", description="Supervised warm-up.")
    begin = parser.add_mutually_exclusive_group(required=True)
    begin.add_argument("--model-config", type=Path, help="start from random weights: directory with a config.json")
    begin.add_argument("--model", type=Path, help="start from the weights of this Hugging Face directory")
    parser.add_argument("--tokenizer", type=Path, help="directory of the tokenizer; default: the model's")
    parser.add_argument("--data", type=Path, required=True, help="JSONL file, see above")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--tokens-per-batch", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--max-seconds", type=float, default=math.inf)
    arguments = parser.parse_args(argv)
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("--device cuda was asked for, but this torch sees no CUDA device")
    source = arguments.model_config or arguments.model
    tokenizer = checkpoint.load_tokenizer(arguments.tokenizer or source)
    if arguments.model_config:
        model = new_model(arguments.model_config, tokenizer, seed=arguments.seed)
    else:
        model = checkpoint.load_model(arguments.model)
    stats = fine_tune(
        model,
        tokenizer,
        read_examples(arguments.data),
        epochs=arguments.epochs,
        lr=arguments.lr,
        tokens_per_batch=arguments.tokens_per_batch,
        seed=arguments.seed,
        device=arguments.device,
        dtype=arguments.dtype,
        max_seconds=arguments.max_seconds,
        log=lambda line: print(line, flush=True),
    )
    checkpoint.save(model, tokenizer, arguments.out)
    print(f"{arguments.out}: {stats.steps} steps, {stats.tokens_per_s:.0f} tokens/s, losses {list(stats.losses)}")


if __name__ == "__main__":
    main()
