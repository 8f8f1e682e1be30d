"""The embedded algorithm on one GPU: random weights of Qwen2.5-0.5B's shape, long prompts, a kill.

    python tests/benchmarks/embedded_gpu.py                                   # five steps on one CUDA device
    python tests/benchmarks/embedded_gpu.py --hardware cpu --shape tiny --max-tokens 16 --tasks 2

It makes model, tokenizer and tasks itself and needs no network. Prompts have 1,000 tokens. The run is killed (SIGKILL)
after step 3 and resumed. Each step must be there once, the weights must have changed, and the server's
log-probabilities must be the learner's: mean ratios near 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "random_policy"))
import killed
import plugin
import start

STEPS, AFTER = 5, 3


def main() -> None:
    """Make the model, train, check and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", default="cuda", help="cuda or cpu")
    parser.add_argument("--shape", choices=tuple(start.SHAPES), default="0.5b")
    parser.add_argument("--words", type=int, default=990, help="words, which are tokens, of a prompt")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--tasks", type=int, default=16, help="tasks of a step, each with 8 rollouts")
    parser.add_argument("--ratio", type=float, default=0.02, help="how far the mean ratio may be from 1")
    parser.add_argument("--timeout", type=float, default=600.0, help="longest wait for each half of the run, seconds")
    options = parser.parse_args()
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="agentrig-random-") as folder:
        figures = measure(Path(folder), options)
    print(json.dumps({**figures, "wall_s": round(time.perf_counter() - begun, 1)}, indent=1))


def measure(folder: Path, options: argparse.Namespace) -> dict[str, object]:
    """Train and return the figures; raises SystemExit where something is not as it must be."""
    model = folder / "model"
    texts = [plugin.paragraph(i, 400) for i in range(50)]
    parameters = start.make(
        model, family="qwen2", shape=options.shape, context=options.words + options.max_tokens + 64, texts=texts
    )
    made = time.perf_counter()
    words = [
        "--plugin", str(Path(plugin.__file__)), "--tasks", "paragraphs", "--agent", "reader", "--reward", "letters",
        "--adapter", "agent-match", "--algorithm", "grpo", "--hardware", options.hardware, "adapter.match=reader",
        f"tasks.words={options.words}", f"tasks.tasks={max(options.tasks, 4)}", "run.report_tasks=4", "run.seed=0",
        f"algorithm.model={model}", f"algorithm.tasks_per_step={options.tasks}", "algorithm.group_size=8",
        f"algorithm.max_tokens={options.max_tokens}", "algorithm.lr=1e-5", "algorithm.validate_every=0",
        f"algorithm.gradient_checkpointing={'false' if options.hardware == 'cpu' else 'true'}",
        "runners.n=2", "runners.threads=32",
    ]  # fmt: skip
    run = killed.Run(folder)
    lines = killed.kill_and_resume(run, words, after=AFTER, steps=STEPS, pause_s=0.5, timeout_s=options.timeout)
    print(killed.table(lines), flush=True)
    off = {line["step"]: line["algorithm"]["ratio_mean"] for line in lines}
    if any(abs(ratio - 1) > options.ratio for ratio in off.values()):
        raise SystemExit(f"the server's log-probabilities are not the learner's: mean ratios {off}")
    least = min(line["prompt_tokens"] for line in lines)
    if least < options.words:
        raise SystemExit(f"prompts have {least:.0f} tokens, fewer than {options.words}")
    latest = sorted((run.path / "checkpoints").glob(f"*{STEPS:05d}"))[-1]
    changed = start.weights_differ(model, latest)
    if not changed:
        raise SystemExit("the last checkpoint holds the weights of the start")
    return {
        "parameters": parameters,
        "hardware": options.hardware,
        "tensors that changed": changed,
        "median step, s": round(sorted(line["step_s"] for line in lines)[STEPS // 2], 2),
        "learner tokens/s": [round(line["algorithm"]["learner_tokens_per_s"]) for line in lines],
        "sampled tokens/s": [round(line["tokens_per_s"]) for line in lines],
        "peak host memory, MiB": run.peak >> 20,
        "training_s": round(time.perf_counter() - made, 1),
    }


if __name__ == "__main__":
    main()
