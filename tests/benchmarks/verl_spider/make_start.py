"""Makes the starting model of the Spider run from nothing, and measures it. See README.md.

python tests/benchmarks/verl_spider/make_start.py --data DIR --out MODEL --device cuda --max-seconds 240
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import turns
from agentrig_grpo import checkpoint
from agentrig_grpo.warmup import Example, fine_tune, new_model
from agentrig_spider import ExecMatch
from agentrig_spider.queries import sql_of
from agentrig_spider.tasks.spider import Spider, SpiderConfig
from byte_tokenizer import served_alike

from agentrig import Task

POSITIONS = 1280
"""The model's context: the run's longest prompt and reply fit with room to spare."""

SIZES: Mapping[str, Mapping[str, int]] = {
    "base": {"hidden_size": 768, "layers": 12, "heads": 12, "kv_heads": 4, "intermediate_size": 2560},
    "small": {"hidden_size": 512, "layers": 8, "heads": 8, "kv_heads": 4, "intermediate_size": 1664},
    "tiny": {"hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate_size": 192},
}
"""Architectures: about 94, 29 and 0.5 million parameters with a vocabulary of 5,400."""


def model_config(size: str, vocabulary: int) -> Any:
    """Return the architecture: a Qwen2."""
    from transformers import Qwen2Config

    shape = SIZES[size]
    return Qwen2Config(
        vocab_size=math.ceil(vocabulary / 64) * 64,  # whole tiles for the matrix units
        hidden_size=shape["hidden_size"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        intermediate_size=shape["intermediate_size"],
        tie_word_embeddings=True,
        max_position_embeddings=POSITIONS,
    )


def first_prompt(task: Task) -> str:
    """Return what the model reads when the agent first asks it."""
    return turns.first_prompt(task.input["database"], task.input["question"])


@torch.no_grad()
def greedy(
    model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], *, dtype: str, batch: int = 512, most: int = 192
) -> list[str]:
    """Return the likeliest reply to each prompt; prompts of like length go together."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    replies = [""] * len(prompts)
    for begin in range(0, len(order), batch):
        part = order[begin : begin + batch]
        width = len(prompts[part[-1]])
        ids = torch.full((len(part), width), tokenizer.pad_token_id)
        mask = torch.zeros_like(ids)
        for row, i in enumerate(part):
            ids[row, width - len(prompts[i]) :] = torch.tensor(prompts[i])
            mask[row, width - len(prompts[i]) :] = 1
        with torch.autocast(model.device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
            out = model.generate(
                input_ids=ids.to(model.device),
                attention_mask=mask.to(model.device),
                max_new_tokens=most,
                do_sample=False,
            )
        texts = tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)
        for i, text in zip(part, texts, strict=True):
            replies[i] = text
    return replies


def measure(model: Any, tokenizer: Any, tasks: Sequence[Task], *, dtype: str) -> dict[str, Any]:
    """Return the execution accuracy of greedy write turns and how many queries run; some of them as samples."""
    start = time.perf_counter()
    prompts = tokenizer([first_prompt(task) for task in tasks], add_special_tokens=False)["input_ids"]
    queries = [sql_of(reply) for reply in greedy(model, tokenizer, prompts, dtype=dtype)]
    sampled_s = time.perf_counter() - start
    asked = [(q, t.private["gold"], t.input["database"]) for q, t in zip(queries, tasks, strict=True)]
    scores = ExecMatch().score_many(asked)
    shown = [
        {"question": task.input["question"], "query": query, "right": score.value == 1.0}
        for task, query, score in list(zip(tasks, queries, scores, strict=True))[:8]
    ]
    return {
        "n": len(tasks),
        "accuracy": round(sum(s.value == 1.0 for s in scores) / len(tasks), 4),
        "runs": round(sum(bool(s.components.get("executes")) for s in scores) / len(tasks), 4),
        "sampling_s": round(sampled_s, 1),
        "judging_s": round(time.perf_counter() - start - sampled_s, 1),
        "samples": shown,
    }


def main() -> None:
    """Train, save and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with data.py's examples.npz and tokenizer/")
    parser.add_argument("--spider", type=Path, help="the run's Spider folder; default: rl/ in --data")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--size", choices=tuple(SIZES), default="base")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--max-seconds", type=float, default=math.inf, help="for both stages together, with no preparation or measuring"
    )
    parser.add_argument("--first", type=float, default=0.75, help="the first stage's share of that time")
    parser.add_argument("--epochs", type=float, nargs=2, default=(3.0, 1.0), help="most passes of each stage")
    parser.add_argument("--lr", type=float, nargs=2, default=(8e-4, 3e-4), help="greatest rate of each stage")
    parser.add_argument(
        "--rehearsed", type=float, default=1.0, help="first-stage examples in the second, as a share of its own"
    )
    parser.add_argument("--tokens-per-batch", type=int, default=24576)
    parser.add_argument("--limit", type=int, default=0, help="so many examples of each stage at most; 0 for all")
    parser.add_argument("--measured", type=int, default=300, help="questions of dev, and as many reward-only ones")
    arguments = parser.parse_args()
    begun = time.perf_counter()
    torch.backends.cuda.matmul.allow_tf32 = True
    dtype = "float32" if arguments.device == "cpu" else "bfloat16"
    tokenizer = checkpoint.load_tokenizer(arguments.data / "tokenizer")
    model = new_model(model_config(arguments.size, len(tokenizer)), tokenizer, seed=arguments.seed)
    figures: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    stages = turns.load(arguments.data / "examples.npz")
    left = arguments.max_seconds
    first, second = stages.values()
    # Real names alone make the model forget how to copy those that it has never seen.
    rng = random.Random(arguments.seed)
    second += rng.sample(first, min(len(first), round(arguments.rehearsed * len(second))))
    for number, (name, pairs) in enumerate(stages.items()):
        if arguments.limit:
            pairs = random.Random(arguments.seed).sample(pairs, min(arguments.limit, len(pairs)))
        begin = time.perf_counter()
        stats = fine_tune(
            model,
            [Example(prompt, reply) for prompt, reply in pairs],
            epochs=arguments.epochs[number],
            lr=arguments.lr[number],
            tokens_per_batch=arguments.tokens_per_batch,
            seed=arguments.seed + number,
            device=arguments.device,
            dtype=dtype,
            max_seconds=left * arguments.first if number == 0 else left,
            log=lambda line: print(line, flush=True),
        )
        left -= stats.wall_s
        figures[name] = {
            "steps": stats.steps,
            "tokens": stats.tokens,
            "tokens_per_s": round(stats.tokens_per_s),
            "losses": [round(loss, 4) for loss in stats.losses],
            "wall_s": round(stats.wall_s, 1),
            "with_preparation_s": round(time.perf_counter() - begin, 1),
        }
        print(name, json.dumps(figures[name]), flush=True)
    checkpoint.save(model, tokenizer, arguments.out)
    print(f"{arguments.out} is written after {time.perf_counter() - begun:.0f} s", flush=True)
    tasks = Spider(SpiderConfig(dir=str(arguments.spider or arguments.data / "rl")))
    for split in ("dev", "train") if arguments.measured else ():
        every = list(tasks.load(split))
        chosen = random.Random(arguments.seed).sample(every, min(arguments.measured, len(every)))
        figures[split] = measure(model, tokenizer, chosen, dtype=dtype)
        figures[split]["served_alike"] = served_alike(arguments.out, tokenizer, [first_prompt(t) for t in chosen])
    figures["wall_s"] = round(time.perf_counter() - begun, 1)
    (arguments.out / "start.json").write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
