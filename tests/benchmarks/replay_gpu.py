"""Replay on one GPU: random weights of Qwen2.5-0.5B's shape, two steps, each repeated from its record.

    python tests/benchmarks/replay_gpu.py                               # all weights, then LoRA, on one CUDA device
    python tests/benchmarks/replay_gpu.py --hardware cpu --shape tiny --words 40 --max-tokens 16 --tasks 2

It makes model, tokenizer and tasks itself and needs no network. The first step starts from the model, the second from a
checkpoint. On a GPU the order of additions differs from run to run: figures and new weights must lie within replay's
bounds, and every stage before them must be the same. On the CPU all must be the same bit for bit. Prints the stages,
how far the weights are apart, and what the digests of a step cost beside its update.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "random_policy"))
import plugin
import start

STEPS = 2
EXACT = {"rescore", "tasks", "start", "rewards", "triplets", "advantages", "samples", "batches"}


def main() -> None:
    """Make the model, train and replay; exit status 1 where a step is not repeated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", default="cuda", help="cuda or cpu")
    parser.add_argument("--shape", choices=tuple(start.SHAPES), default="0.5b")
    parser.add_argument("--words", type=int, default=490, help="words, which are tokens, of a prompt")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--tasks", type=int, default=8, help="tasks of a step, each with 8 rollouts")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="agentrig-replay-gpu-") as folder:
        figures = measure(Path(folder), options)
    print(json.dumps(figures, indent=1))
    if not all(one["same"] for one in figures["replays"]):
        raise SystemExit(1)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train with all weights and with LoRA, replay each step, and return what was found."""
    texts = [plugin.paragraph(i, 400) for i in range(50)]
    context = options.words + options.max_tokens + 64
    parameters = start.make(folder / "model", family="qwen2", shape=options.shape, context=context, texts=texts)
    found: dict[str, Any] = {"parameters": parameters, "hardware": options.hardware, "replays": []}
    for name, more in (("full", ()), ("lora", ("algorithm.lora_rank=16",))):
        run = train(folder, name, options, more)
        lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
        found[f"{name}: step, s"] = [round(line["step_s"], 2) for line in lines]
        found[f"{name}: update, s"] = [round(line["time_s"]["update"], 2) for line in lines]
        for step in range(1, STEPS + 1):
            found["replays"].append({"run": name, **replayed(run, step)})
    found["digests of all weights and their moments, s"] = round(digest_seconds(folder / "model", options.hardware), 4)
    return found


def train(folder: Path, name: str, options: argparse.Namespace, more: tuple[str, ...]) -> Path:
    """Train two steps and return the run directory."""
    words = [
        "--plugin", str(Path(plugin.__file__)), "--tasks", "paragraphs", "--agent", "reader", "--reward", "letters",
        "--adapter", "agent-match", "--algorithm", "grpo", "--hardware", options.hardware, "adapter.match=reader",
        f"tasks.words={options.words}", f"tasks.tasks={max(options.tasks, 4)}", "run.report_tasks=1", "run.seed=0",
        f"algorithm.model={folder / 'model'}", f"algorithm.tasks_per_step={options.tasks}", "algorithm.group_size=8",
        f"algorithm.max_tokens={options.max_tokens}", "algorithm.lr=1e-5", "algorithm.validate_every=0",
        f"algorithm.steps={STEPS}", "algorithm.save_every=1", "algorithm.keep_every=1", "algorithm.ppo_epochs=2",
        f"algorithm.gradient_checkpointing={'false' if options.hardware == 'cpu' else 'true'}",
        "runners.n=2", "runners.threads=32", f"run.directory={folder}", f"run.name={name}", *more,
    ]  # fmt: skip
    agentrig("train", *words)
    return folder / name


def agentrig(*words: str) -> str:
    """Run a command and return what it printed; an error ends the script."""
    done = subprocess.run([sys.executable, "-m", "agentrig", *words], capture_output=True, text=True, timeout=900)
    if done.returncode not in (0, 1) or not done.stdout:
        raise SystemExit(
            f"agentrig {words[0]} ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
    return done.stdout


def replayed(run: Path, step: int) -> dict[str, Any]:
    """Replay a step; print its stages, and return whether it is the same and how far its weights are."""
    begun = time.perf_counter()
    found = json.loads(agentrig("replay", str(run), "--step", str(step), "--rescore", "--json"))
    print(f"{run.name}, step {step}", flush=True)
    for stage in found["stages"]:
        print(f"  {stage['name']:<11} {stage['result']:<13} {stage['detail']}", flush=True)
    results = {stage["name"]: stage["result"] for stage in found["stages"]}
    return {
        "step": step,
        "same": found["same"] and all(results[name] == "ok" for name in (*EXACT, "figures", "weights")),
        "bit for bit expected": found["bit_for_bit_expected"],
        "weights": found["stages"][-1]["detail"],
        "s": round(time.perf_counter() - begun, 1),
    }


def digest_seconds(model: Path, hardware: str) -> float:
    """Return the median time of a step's digests of tensors: the weights twice, two moments once."""
    import torch
    from agentrig_grpo.checkpoint import load_model
    from agentrig_grpo.digests import tensor_digests

    tensors = dict(load_model(model, device=hardware).named_parameters())
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        for _ in range(4):
            tensor_digests(tensors)
        times.append(time.perf_counter() - begun)
    del tensors
    if hardware != "cpu":
        torch.get_device_module(hardware).empty_cache()
    return statistics.median(times)


if __name__ == "__main__":
    main()
