"""Time the embedded learner's update, with shared tokens computed once and with every call computed in full.

```
python tests/benchmarks/learner.py --shape qwen2.5-1.5b --groups 32 --size 4 --prompt 816 --answer 128
python tests/benchmarks/learner.py --shape llama-30m --groups 2 --size 8 --prompt 3000 --answer 100 --turns 1
python tests/benchmarks/learner.py --shape qwen2.5-1.5b --groups 16 --size 8 --prompt 4000 --answer 200 \
    --grid 8192:0,16384:10,24576:18
```

Random weights, random tokens, answers of equal length; with `--turns` more than one each rollout is a conversation
whose next prompt is the one before with its answer and twenty new tokens. With `--unequal` groups have 1 to twice
`--size` rollouts, and prompts and answers between half and one and a half of their lengths. With `--grid` only pairs of
a pass's tokens and a number of layers computed twice are timed, in turns. Prints JSON: seconds of
each update, tokens computed, predicted and traced (predicted: each group's prompt and each rollout's history once, by
arithmetic; a prompt comes again in each further pass that its group needs), peak memory, the estimate of it that a run
makes before its first step, MFU with every call counted in full (forward and twice that backward, of the bf16 peak
that `--peak` names), and the difference of the log-probabilities of the two ways, beside that of two layouts without
sharing.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from agentrig_forest.sequences import packed
from agentrig_grpo.config import GrpoConfig
from agentrig_grpo.learner import Learner, TrainSample
from agentrig_grpo.memory import need_of

SHAPES: dict[str, dict[str, Any]] = {
    "llama-30m": {
        "kind": "llama", "vocab_size": 8192, "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 4, "intermediate_size": 1536,
    },
    "llama-135m": {
        "kind": "llama", "vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "intermediate_size": 1536,
    },
    "qwen2.5-0.5b": {
        "kind": "qwen2", "vocab_size": 151936, "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "intermediate_size": 4864,
    },
    "qwen2.5-1.5b": {
        "kind": "qwen2", "vocab_size": 151936, "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "intermediate_size": 8960,
    },
}  # fmt: skip


def model_of(shape: str, device: str) -> Any:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    values = dict(SHAPES[shape])
    torch.manual_seed(0)
    with torch.device(device):
        config = CONFIG_MAPPING[values.pop("kind")](
            **values, max_position_embeddings=32768, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0
        )
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def samples_of(options: argparse.Namespace, vocabulary: int) -> list[TrainSample]:
    rng = random.Random(0)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(5, vocabulary) for _ in range(n)]

    def about(n: int) -> int:
        return rng.randrange(n // 2, n + n // 2) if getattr(options, "unequal", False) else n

    found = []
    for group in range(options.groups):
        prompt = tokens(about(options.prompt))
        size = rng.randrange(1, 2 * options.size) if getattr(options, "unequal", False) else options.size
        for place in range(size):
            history = prompt
            for _ in range(options.turns):
                answer = tokens(about(options.answer))
                found.append(
                    TrainSample(
                        prompt_ids=history,
                        response_ids=answer,
                        logprobs=None,
                        group=str(group),
                        advantage=1.0 if place % 2 else -1.0,
                        rollout=group * 2 * options.size + place,
                    )
                )
                history = [*history, *answer, *tokens(20)]
    return found


def predicted(samples: list[TrainSample]) -> int:
    """Return how many tokens are computed if each group's prompt, and each rollout's history, is computed once.

    By arithmetic on lengths, as the samples were made: a rollout's last call contains all of its earlier ones, and the
    group's prompt. The last token of an answer is only a target.
    """
    longest: dict[int, TrainSample] = {}
    prompts: dict[str, int] = {}
    for s in samples:
        longest[s.rollout] = max(longest.get(s.rollout, s), s, key=lambda x: len(x.prompt_ids))
        prompts[s.group] = min(prompts.get(s.group, len(s.prompt_ids)), len(s.prompt_ids))
    own = sum(len(s.prompt_ids) + len(s.response_ids) - 1 - prompts[s.group] for s in longest.values())
    return own + sum(prompts.values())


@torch.no_grad()
def difference(learner: Learner, samples: list[TrainSample]) -> dict[str, float]:
    """Return the largest and the mean difference of log-probabilities between layouts, of some calls.

    `shared`: between shared tokens and a row a call; `unshared`: between packs of rows and one row at a time.
    """
    share, found = learner.share, []
    for way, budget in ((True, 1 << 15), (False, 1 << 14), (False, 1)):
        learner.share = way and share
        table = torch.zeros(len(samples), max(len(s.response_ids) for s in samples), device=learner._device)
        for pack in packed(samples, budget, share=learner.share):
            batch = learner._collate(pack)
            table[batch.sample, batch.place] = learner._score(learner.model, batch)[0]
        found.append(table)
    learner.share = share
    used = found[1] != 0
    pairs = {"shared": (found[0], found[1]), "unshared": (found[2], found[1])}
    gaps = {name: (a - b).abs()[used] for name, (a, b) in pairs.items()}
    return {f"{name}_{kind}": float(getattr(gap, kind)()) for name, gap in gaps.items() for kind in ("max", "mean")}


def estimate(model: Any, config: GrpoConfig, learner: Learner, device: torch.device) -> dict[str, Any]:
    """Return the memory of an update as a run knows it before its first step, and how long that took."""
    with tempfile.TemporaryDirectory() as directory:
        model.config.save_pretrained(directory)
        start = time.perf_counter()
        dtype = "bfloat16" if device.type == "cuda" else "float32"
        more = {"dtype": dtype, "device": str(device), "attention": "sdpa", "chunk": learner._chunk}
        need = need_of(Path(directory), config, **more)
    return {"peak_gib": round(need.peak / 2**30, 2), "parts": need.describe(), "s": time.perf_counter() - start}


def flops(model: Any, samples: list[TrainSample]) -> float:
    """Return the arithmetic of one update in which every call is computed in full: forward and twice that backward."""
    config = model.config
    dense = sum(p.numel() for name, p in model.named_parameters() if "embed" not in name)
    head = config.hidden_size * config.vocab_size
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    total = 0.0
    for s in samples:
        n = len(s.prompt_ids) + len(s.response_ids)
        attention = 2 * config.num_hidden_layers * config.num_attention_heads * size * n * n  # causal: half of 4
        total += 2 * dense * n + 2 * head * len(s.response_ids) + attention
    return 3 * total


def grid(learner: Learner, samples: list[TrainSample], pairs: str, updates: int) -> dict[str, dict[str, Any]]:
    """Return the seconds of updates, and on a GPU the peak, for each pair of pass and layers; they take turns."""
    found: dict[str, dict[str, Any]] = {pair: {"seconds": [], "peak_gib": 0.0} for pair in pairs.split(",")}
    for turn in range(updates):
        for place, (pair, figures) in enumerate(found.items()):
            learner.fit(*map(int, pair.split(":")))
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            learner.update(samples, step=1 + turn * len(found) + place)
            figures["seconds"].append(round(time.perf_counter() - start, 3))
            if f"{learner.tokens}:{learner.recomputed}" != pair:
                raise SystemExit(f"{pair} does not fit: {learner.tokens}:{learner.recomputed} ran")
            if torch.cuda.is_available():
                figures["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    for figures in found.values():
        figures["median"] = statistics.median(figures["seconds"][1:] or figures["seconds"])
    return found


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-30m")
    for name, value in {"groups": 4, "size": 4, "prompt": 600, "answer": 100, "turns": 1, "updates": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--budget", type=int, default=8192, help="tokens_per_batch")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing")
    parser.add_argument("--unequal", action="store_true", help="groups, prompts and answers of different sizes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--peak", type=float, default=790e12, help="the device's bf16 FLOP/s, for the MFU")
    parser.add_argument("--ways", default="shared,plain")
    parser.add_argument("--grid", default="", help="TOKENS:LAYERS,…, timed in turns")
    options = parser.parse_args()
    device = torch.device(options.device)
    bf16 = device.type == "cuda"
    out: dict[str, Any] = {"options": vars(options)}
    samples: list[TrainSample] = []
    for way in options.ways.split(","):
        model = model_of(options.shape, options.device)
        samples = samples or samples_of(options, model.config.vocab_size)
        config = GrpoConfig(
            lr=1e-6,
            group_size=max(2, options.size),
            max_tokens=options.answer,
            tokens_per_batch=options.budget,
            gradient_checkpointing=options.checkpointing,
        )
        learner = Learner(model, config, dtype="bfloat16" if bf16 else "float32", seed=0)
        if options.grid:
            out["grid"] = grid(learner, samples, options.grid, options.updates)
            break
        if way == "plain":
            learner.share = False
        else:
            out["difference"] = difference(learner, samples[: 2 * options.size])
            out["estimate"] = estimate(model, config, learner, device)
        seconds = []
        if bf16:
            torch.cuda.reset_peak_memory_stats()
        for step in range(1, options.updates + 1):
            start = time.perf_counter()
            metrics = learner.update(samples, step=step)
            seconds.append(round(time.perf_counter() - start, 3))
        best = statistics.median(seconds[1:] or seconds)
        peak = torch.cuda.max_memory_allocated() if bf16 else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        out[way] = {
            "seconds": seconds,
            "computed_tokens": metrics["computed_tokens"],
            "predicted_tokens": predicted(samples) if way != "plain" else metrics["traced_tokens"],
            "traced_tokens": metrics["traced_tokens"],
            "peak_gib": round(peak / 2**30, 2),
            "loss": metrics["loss"],
            "grad_norm": metrics["grad_norm"],
            **({"mfu": round(flops(model, samples) / best / options.peak, 3)} if bf16 else {}),
        }
        del model, learner
        if bf16:
            torch.cuda.empty_cache()
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
