"""Time the embedded learner's update, with shared tokens computed once and with every call computed in full.

```
python tests/benchmarks/learner.py --shape qwen2.5-1.5b --groups 32 --size 4 --prompt 816 --answer 128
python tests/benchmarks/learner.py --shape llama-30m --groups 2 --size 8 --prompt 3000 --answer 100 --turns 1
```

Random weights, random tokens, answers of equal length; with `--turns` more than one each rollout is a conversation
whose next prompt is the one before with its answer and twenty new tokens. Prints JSON: seconds of each update, tokens
computed and traced, peak memory, MFU with every call counted in full (forward and twice that backward, of the bf16 peak
that `--peak` names), and the largest difference of the log-probabilities of the two ways.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import time
from typing import Any

import torch
from agentrig_grpo.config import GrpoConfig
from agentrig_grpo.learner import Learner, TrainSample

from agentrig.forest.scoring import score
from agentrig.forest.sequences import collate, packed

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
    """Return a random model."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    values = dict(SHAPES[shape])
    torch.manual_seed(0)
    with torch.device(device):
        config = CONFIG_MAPPING[values.pop("kind")](
            **values, max_position_embeddings=32768, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0
        )
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def samples_of(options: argparse.Namespace, vocabulary: int) -> list[TrainSample]:
    """Return a step's calls."""
    rng = random.Random(0)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(5, vocabulary) for _ in range(n)]

    found = []
    for group in range(options.groups):
        prompt = tokens(options.prompt)
        for place in range(options.size):
            history = prompt
            for _ in range(options.turns):
                answer = tokens(options.answer)
                found.append(
                    TrainSample(
                        prompt_ids=history,
                        response_ids=answer,
                        logprobs=None,
                        group=str(group),
                        advantage=1.0 if place % 2 else -1.0,
                        rollout=group * options.size + place,
                    )
                )
                history = [*history, *answer, *tokens(20)]
    return found


@torch.no_grad()
def difference(model: Any, samples: list[TrainSample], device: torch.device, *, bf16: bool) -> float:
    """Return the largest difference of the log-probabilities with and without sharing, of the first calls."""
    both = []
    for share in (True, False):
        found = torch.zeros(len(samples), max(len(s.response_ids) for s in samples), device=device)
        for pack in packed(samples, 1 << 15, share=share):
            batch = collate(pack, share=share, varlen=share and bf16 and device.type == "cuda").to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                found[batch.sample, batch.place] = score(model, batch)[0]
        both.append(found)
    return float((both[0] - both[1]).abs().max())


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


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-30m")
    for name, value in {"groups": 4, "size": 4, "prompt": 600, "answer": 100, "turns": 1, "updates": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--budget", type=int, default=8192, help="tokens_per_batch")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--peak", type=float, default=790e12, help="the device's bf16 FLOP/s, for the MFU")
    parser.add_argument("--ways", default="shared,plain")
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
            tokens_per_batch=options.budget,
            gradient_checkpointing=options.checkpointing,
        )
        learner = Learner(model, config, dtype="bfloat16" if bf16 else "float32", seed=0)
        if way == "plain":
            learner.share = False
        else:
            out["difference"] = difference(model, samples[: 2 * options.size], device, bf16=bf16)
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
