"""Makes `starter`, the model that `agentrig warmup` begins with, from random weights. See README.md beside this file.

    python make_starter.py --out DIR [--minutes 8] [--device cuda]

It learns to copy, to look up, to fill a template in and to call tools, from conversations that `starter_examples.py`
makes without end. Processes of their own make them while the model trains.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import queue
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from starter_examples import FAMILIES, Conversation, conversation
from tokenizers import Tokenizer

REPLY, PROMPT = 255, 26
"""Weights in the loss: of a token of a reply, and of any other token. What repeats in a prompt teaches copying too."""

REPEATS = 0.08
"""Until this share of the training, half of the batches are random tokens, said twice."""

FULL_SIZE = 0.4
"""From this share of the training on, conversations have their full size."""

RENAMED = 0.25
"""Share of rows whose names are exchanged for tokens at random, the same ones for the same everywhere in the row."""

SHELF = 256
"""Batches that are kept; the next one is any of them."""

PARTS = 8
"""Batches that are made at once, so that rows of similar length come together."""

BETAS, WEIGHT_DECAY, WARMUP, GRAD_NORM = (0.9, 0.95), 0.02, 0.02, 1.0


# ----- conversations as token ids, in processes of their own --------------------------------------------------------


def pieces(found: Conversation) -> Iterator[tuple[str, bool]]:
    """Yield a conversation's text as the chat template writes it, in parts, and whether a part is a reply."""
    if found.tools:
        yield "<|tools|>" + "".join(json.dumps(t["function"], ensure_ascii=False) + "\n" for t in found.tools), False
    for message in found.messages:
        text = message["content"] or ""
        if message["role"] != "assistant":
            yield f"<|{message['role']}|>{text}", False
            continue
        for made in message.get("tool_calls") or ():
            function = {k: made["function"][k] for k in ("name", "arguments")}
            text += f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"
        yield "<|assistant|>", False
        yield f"{text}<|end|>", True


def encoded(found: Sequence[Conversation], tokenizer: Tokenizer) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return token ids and the weight of each in the loss, for each conversation."""
    parts = [list(pieces(one)) for one in found]
    ids = iter(tokenizer.encode_batch([text for one in parts for text, _ in one], add_special_tokens=False))
    made = []
    for one in parts:
        encodings = [(next(ids).ids, REPLY if reply else PROMPT) for _, reply in one]
        tokens = np.array([token for some, _ in encodings for token in some], dtype=np.int32)
        weights = np.array([weight for some, weight in encodings for _ in some], dtype=np.uint8)
        made.append((tokens, weights))
    return made


def padded(rows: Sequence[tuple[np.ndarray, np.ndarray]], multiple: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and weights as arrays [rows, length], padded on the right with token 0 of weight 0."""
    length = -(-max(len(ids) for ids, _ in rows) // multiple) * multiple
    ids, weights = np.zeros((len(rows), length), np.int16), np.zeros((len(rows), length), np.uint8)
    for i, (some, weight) in enumerate(rows):
        ids[i, : len(some)], weights[i, : len(some)] = some, weight
    return ids, weights


def batches(
    rng: random.Random, families: Sequence[str], level: float, budget: int, longest: int, tokenizer: Tokenizer
) -> list[Any]:
    """Return `PARTS` batches or so of at most `budget` tokens, rows of similar length together."""
    rows: list[tuple[np.ndarray, np.ndarray]] = []
    tokens = 0
    while tokens < PARTS * budget:
        made = encoded([conversation(rng, level, families) for _ in range(64)], tokenizer)
        rows += [row for row in made if len(row[0]) <= longest]
        tokens = sum(len(ids) for ids, _ in rows)
    rows.sort(key=lambda row: len(row[0]))
    found, begin = [], 0
    while begin < len(rows):
        end = begin + 1
        while end < len(rows) and (end + 1 - begin) * (len(rows[end][0]) + 31) <= budget:
            end += 1
        found.append(padded(rows[begin:end]))
        begin = end
    return found


def produce(
    tokenizer_file: str, seed: int, families: Sequence[str], level: Any, budget: int, longest: int, made: Any
) -> None:
    """Put batches into a queue for ever; what a process of its own runs. It ends when its parent does."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer.from_file(tokenizer_file)
    rng = random.Random(seed)
    while True:
        found = batches(rng, families, level.value, budget, longest, tokenizer)
        rng.shuffle(found)
        for batch in found:
            while True:
                try:
                    made.put(batch, timeout=5)
                    break
                except queue.Full:
                    parent = multiprocessing.parent_process()
                    if parent is not None and not parent.is_alive():
                        return


# ----- the model ----------------------------------------------------------------------------------------------------


def model_config(vocabulary: int, width: int, layers: int, inner: int, context: int) -> Any:
    """Return the architecture, a Qwen2."""
    from transformers import Qwen2Config

    heads = width // 32
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=inner,
        tie_word_embeddings=True,
        max_position_embeddings=context,
        initializer_range=width**-0.5,
    )


def renamer(tokenizer: Tokenizer, vocabulary: int, device: Any) -> Any:
    """Return a function that exchanges the names in some rows of token ids; see `RENAMED`."""
    import torch
    from starter_words import KEYWORDS, SMALL
    from tokenizers import pre_tokenizers

    plain = set("Ġ\nĊĉ") | {c for c in pre_tokenizers.ByteLevel.alphabet() if c.isascii() and not c.isalnum()}
    kept = {*KEYWORDS, *SMALL} | {added.content for added in tokenizer.get_added_tokens_decoder().values()}
    free = [i for token, i in tokenizer.get_vocab().items() if token not in kept and not any(c in plain for c in token)]
    digits = [i for token, i in tokenizer.get_vocab().items() if token in set("0123456789")]
    groups = [torch.tensor(sorted(set(free) - set(digits)), device=device), torch.tensor(sorted(digits), device=device)]

    def renamed(ids: Any) -> Any:
        rows = len(ids)
        table = torch.arange(vocabulary, device=device).repeat(rows, 1)
        chosen = torch.rand(rows, 1, device=device) < RENAMED
        for group in groups:
            order = torch.rand(rows, len(group), device=device).argsort(1)
            table[:, group] = torch.where(chosen, group[order], group)
        return table.gather(1, ids)

    return renamed


def repeated(rows: int, length: int, vocabulary: int, device: Any) -> tuple[Any, Any]:
    """Return token ids [rows, length] in which a part at random comes twice, and weights: 1 where it comes again."""
    import torch

    period = torch.randint(4, length // 2 + 1, (rows, 1), device=device)
    ids = torch.randint(16, vocabulary - 16, (rows, length), device=device)  # the first and last ones are special
    places = torch.arange(length, device=device).expand(rows, length)
    again = places >= period
    return ids.gather(1, places % period), again.float()


def loss_of(model: Any, ids: Any, weights: Any, device: str) -> Any:
    """Return the mean cross-entropy in nats, each token by its weight."""
    import torch

    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    return (loss * weights[:, 1:].flatten()).sum() / weights[:, 1:].sum()


def measure(model: Any, held_out: Mapping[str, Any], device: str) -> dict[str, float]:
    """Return for each family the share of replies that greedy sampling says exactly, given what came before."""
    import torch

    found = {}
    model.eval()
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        for family, (ids, weights) in held_out.items():
            right = total = 0
            for some, weight in zip(ids.split(32), weights.split(32), strict=True):
                said = model(input_ids=some[:, :-1], use_cache=False).logits.argmax(-1)
                reply = weight[:, 1:] == REPLY
                number = ((reply & (weight[:, :-1] != REPLY)).cumsum(1) * reply).cpu()  # of each reply, from 1
                wrong = ((said != some[:, 1:]) & reply).cpu()
                for replies, places in zip(number, wrong, strict=True):
                    total += int(replies.max())
                    right += int(replies.max()) - len(set(replies[places].tolist()))
            found[family] = right / max(1, total)
    model.train()
    return found


def scheduled(progress: float) -> float:
    """Return the learning rate's factor: up, and down along a cosine to a twentieth."""
    if progress < WARMUP:
        return max(progress / WARMUP, 0.01)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - WARMUP) / (1 - WARMUP))))


def main(words: Sequence[str] | None = None) -> dict[str, float]:
    """Train and save; return the last held-out figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--steps", type=int, default=0, help="end after so many steps, whatever the time")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--inner", type=int, default=384, help="width of the feed-forward layers")
    parser.add_argument("--context", type=int, default=2048, help="tokens that the model can read")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of the longest conversation")
    parser.add_argument("--tokens", type=int, default=0, help="tokens of a batch")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--level", type=float, default=1.0, help="size of the conversations, 0 to 1")
    parser.add_argument("--families", default=",".join(FAMILIES), help="only these")
    parser.add_argument("--workers", type=int, default=0, help="processes that make conversations")
    parser.add_argument("--threads", type=int, default=1, help="of torch, on the CPU")
    parser.add_argument("--every", type=float, default=30.0, help="seconds between measurements")
    parser.add_argument("--held-out", type=int, default=256, help="held-out conversations of each family")
    options = parser.parse_args(words)

    import torch
    import transformers
    from agentrig_grpo import checkpoint
    from starter_tokenizer import save

    device = options.device
    torch.set_num_threads(options.threads)
    if device == "cuda":
        torch.set_float32_matmul_precision("high")
    budget = options.tokens or (65536 if device == "cuda" else 4096)
    workers = options.workers or (max(1, (os.cpu_count() or 2) - 2) if device == "cuda" else 1)
    torch.manual_seed(options.seed)
    tokenizer = save(options.out, options.context)
    backend, vocabulary = tokenizer.backend_tokenizer, len(tokenizer)
    config = model_config(vocabulary, options.width, options.layers, options.inner, options.context)
    config.eos_token_id, config.pad_token_id, config.bos_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id, None
    library: Any = transformers
    model = library.AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device).train()
    model.generation_config = library.GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    matrices = [p for p in model.parameters() if p.ndim > 1]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=BETAS, fused=True)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters, {vocabulary} tokens, {workers} workers, {budget} tokens a batch", flush=True)

    rng = random.Random(f"held out {options.seed}")
    held_out = {}
    families = options.families.split(",")
    if unknown := set(families) - set(FAMILIES):
        parser.error(f"--families: there is no {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    for family in families:
        rows = encoded([conversation(rng, options.level, [family]) for _ in range(options.held_out)], backend)
        rows = sorted((row for row in rows if len(row[0]) <= options.longest), key=lambda row: len(row[0]))
        if len(rows) < options.held_out / 4:
            parser.error(f"--longest {options.longest}: most conversations of the family {family} are longer")
        ids, weights = padded(rows)
        held_out[family] = torch.from_numpy(ids).long().to(device), torch.from_numpy(weights).to(device)

    context = multiprocessing.get_context("spawn")
    level, made = context.Value("d", 0.1 * options.level), context.Queue(maxsize=4 * PARTS)
    processes = []
    for i in range(workers):
        seed = 1000 * (options.seed + 1) + i
        arguments = (str(options.out / "tokenizer.json"), seed, families, level, budget, options.longest, made)
        processes.append(context.Process(target=produce, args=arguments, daemon=True))
    for process in processes:
        process.start()
    rename = renamer(backend, vocabulary, device)
    shelf: list[Any] = [made.get(timeout=120)]
    start = time.perf_counter()
    measured, step, tokens, fresh, total, seen = start, 0, 0, 1, torch.zeros((), device=device), 0
    best, figures = -1.0, {}
    chooser = random.Random(options.seed)

    def put(tensor: Any) -> Any:
        return tensor.pin_memory().to(device, non_blocking=True) if device == "cuda" else tensor

    def progressed() -> float:
        by_steps = step / options.steps if options.steps else 0.0
        return by_steps if options.steps else (time.perf_counter() - start) / (60 * options.minutes)

    try:
        while (progress := progressed()) < 1:
            level.value = options.level * min(1.0, 0.1 + 0.9 * progress / FULL_SIZE)
            for _ in range(4):
                try:
                    batch = made.get_nowait()
                except queue.Empty:
                    break
                fresh += 1
                if len(shelf) < SHELF:
                    shelf.append(batch)
                else:
                    shelf[fresh % SHELF] = batch
            for group in optimizer.param_groups:
                group["lr"] = options.lr * scheduled(progress)
            if progress < REPEATS and step % 2:
                length = 32 + int(224 * progress / REPEATS)
                ids, weights = repeated(max(1, budget // length), length, vocabulary, device)
                loss = loss_of(model, ids, weights, device)
            else:
                some, weight = chooser.choice(shelf)
                ids, weights = (put(torch.from_numpy(x)) for x in (some, weight))
                ids = rename(ids.long())
                loss = loss_of(model, ids, weights.float() / REPLY, device)
                total += loss.detach()
                seen += 1
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step, tokens = step + 1, tokens + ids.numel()
            if time.perf_counter() - measured > options.every or progressed() >= 1:
                figures = measure(model, held_out, device)
                mean = sum(figures.values()) / len(figures)
                elapsed = time.perf_counter() - start
                if not math.isfinite(float(total)):
                    raise SystemExit(f"the loss is not finite after {step} steps: give a smaller --lr")
                shown = "  ".join(f"{family} {share:.3f}" for family, share in figures.items())
                print(
                    f"{elapsed:5.0f} s  step {step}  {tokens / 1e6:.1f}M tokens ({tokens / elapsed:,.0f}/s, batches "
                    f"used {seen / fresh:.1f} times)  level {level.value:.2f}  loss {float(total) / max(1, seen):.4f}  "
                    f"mean {mean:.3f}  {shown}",
                    flush=True,
                )
                total, seen, fresh = torch.zeros((), device=device), 0, 0
                fresh = 1
                if mean > best:
                    best = mean
                    checkpoint.save(model, tokenizer, options.out, dtype=torch.bfloat16)
                measured = time.perf_counter()
    finally:
        for process in processes:
            process.terminate()
    size = sum(file.stat().st_size for file in options.out.iterdir())
    print(f"{options.out}: {size / 1e6:.2f} MB, best mean {best:.3f}")
    return figures


if __name__ == "__main__":
    main()
