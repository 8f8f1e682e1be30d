"""How long a step of TRL's GRPOTrainer takes on one GPU: the peer of one_gpu.py, with its models, prompts and lengths.

    python tests/benchmarks/trl_step.py [--shape 1.5b] [--rows 32x4x816+128] [--lora 16] [--memory-gib 24] [--batch 16]

vLLM runs inside TRL's process (`vllm_mode="colocate"`), so torch's limit of a process stands for a smaller card: both
together get `--memory-gib` less what `--context-gib` says that the process takes beside torch, and vLLM its share
(`--share`, TRL's default of 0.3) of the limit, not of the card. With `--sleep` torch counts what sleeps as taken, and
gets that much more. Weights are fp32 and computed in bf16, frozen ones bf16; all else is TRL's default, gradient
checkpointing among it. End of text is ignored, so that each step trains the stated number of tokens: the script fails
if one trains fewer, or if the card's peak is above the limit. `--batch` is `per_device_train_batch_size`. Prints the
medians of the steps after the second, and the most memory of the card by `nvidia-smi`. Run one at a time on a host:
vLLM's port is fixed. Needs trl 1.16 beside the
packages of agentrig's GPU stack. On a CPU: --shape 18m --rows 2x4x64+16 --batch 4, without vLLM.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import one_gpu
import verl_step


def reward(completions: list[str], **_: Any) -> list[float]:
    """Return the reward of one_gpu.py's tasks: a bit of the answer's hash."""
    return [float(hashlib.sha256(text.encode()).digest()[0] % 2) for text in completions]


def settings(options: argparse.Namespace, folder: Path, share: float, cuda: bool) -> dict[str, Any]:
    """Return the arguments of GRPOConfig for one optimizer step on `tasks` x `n` rows, by its defaults elsewhere."""
    tasks, n, prompt, answer = verl_step.parsed(options.rows)
    served = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": share,
        "vllm_max_model_length": prompt + answer + 64,
        "vllm_enable_sleep_mode": options.sleep,
        "bf16": True,
    }
    return {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": options.batch,
        "gradient_accumulation_steps": tasks * n // options.batch,
        "num_generations": n,
        "max_completion_length": answer,
        "max_steps": options.steps,
        "learning_rate": 1e-6,
        "beta": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "seed": 0,
        "generation_kwargs": {"ignore_eos": True} if cuda else {"eos_token_id": None},
        **(served if cuda else {"bf16": False, "use_cpu": True}),
    }


def train(options: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    """Train and return for each step its seconds, those of its generation, and its trained tokens."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    cuda = torch.cuda.is_available()
    card = torch.cuda.get_device_properties(0).total_memory / 2**30 if cuda else 1.0
    limit = options.memory_gib or card
    if cuda and options.memory_gib:
        asleep = options.share * limit if options.sleep else 0.0  # torch goes on counting what vLLM has given back
        torch.cuda.set_per_process_memory_fraction(min(1.0, (limit - options.context_gib + asleep) / card))
    begun: list[float] = []
    spent = {"generation": 0.0, "tokens": 0.0}
    steps: list[dict[str, float]] = []

    class Timed(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            start = time.perf_counter()
            begun.append(start)
            if len(begun) > 1:
                steps.append({"step": start - begun[-2], **spent})
            spent.update(generation=0.0, tokens=0.0)
            return super()._generate_and_score_completions(inputs)

        def _generate_single_turn(self, *given: Any, **more: Any) -> Any:
            start = time.perf_counter()
            made = super()._generate_single_turn(*given, **more)
            spent["generation"] += time.perf_counter() - start
            return made

        def compute_loss(self, model: Any, inputs: Any, *given: Any, **more: Any) -> Any:
            spent["tokens"] += int(inputs["completion_mask"].sum())
            return super().compute_loss(model, inputs, *given, **more)

    dtype = torch.bfloat16 if options.lora else torch.float32
    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        reward_funcs=reward,
        args=GRPOConfig(**settings(options, folder, options.share * limit / card, cuda)),
        train_dataset=Dataset.from_list(
            [{"prompt": text} for text in json.loads((folder / "prompts.json").read_text("utf-8"))]
        ),
        peft_config=LoraConfig(r=options.lora, lora_alpha=options.lora, target_modules="all-linear")
        if options.lora
        else None,
    )
    trainer.train()
    if cuda:
        torch.cuda.synchronize()
    steps.append({"step": time.perf_counter() - begun[-1], **spent})
    return steps


def main() -> None:
    """Make the model, train, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(verl_step.SHAPES), default="1.5b")
    parser.add_argument("--rows", default="", help="tasks x n x prompt + response tokens of a step")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lora", type=int, default=0, help="rank of the adapters; 0 trains all weights")
    parser.add_argument("--memory-gib", type=float, default=0.0, help="the smaller card that this one stands for")
    parser.add_argument("--context-gib", type=float, default=0.75)
    parser.add_argument("--share", type=float, default=0.3, help="vllm_gpu_memory_utilization, of the limit")
    parser.add_argument("--sleep", action="store_true", help="vllm_enable_sleep_mode")
    options = parser.parse_args()
    options.rows = options.rows or verl_step.ROWS[options.shape]
    tasks, n, prompt, answer = verl_step.parsed(options.rows)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    with tempfile.TemporaryDirectory(prefix="trl-step-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        make = get_context("spawn").Process(  # a process of its own: its context would be counted on the card
            target=verl_step.make_model,
            args=(options.shape, folder / "model"),
            kwargs={"context": prompt + answer + 64},
        )
        make.start()
        make.join()
        verl_step.make_prompts(folder / "prompts.json", prompt)
        with one_gpu.peak_of_the_card("cuda" if shutil.which("nvidia-smi") else "cpu") as peak:
            steps = train(options, folder)
    expected = tasks * n * answer
    print("\n".join(f"step {i}: {json.dumps(step)}" for i, step in enumerate(steps, 1)), flush=True)
    if short := [i for i, step in enumerate(steps, 1) if step["tokens"] != expected]:
        raise SystemExit(f"steps {short} did not train the {expected} tokens that they should")
    late = steps[2:] or steps
    figures = {key: round(statistics.median(step[key] for step in late), 3) for key in ("step", "generation")}
    above = bool(options.memory_gib and peak and max(peak) / 1024 > options.memory_gib)
    print(json.dumps(figures | {"peak_gib": max(peak) / 1024 if peak else None, "options": vars(options)}), flush=True)
    if above:
        raise SystemExit("the card's peak is above the limit")


if __name__ == "__main__":
    main()
