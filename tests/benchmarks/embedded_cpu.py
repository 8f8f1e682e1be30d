"""A model of SmolLM-135M's shape on two CPU cores: seconds of a step by part, and the peak memory of each process.

```
python tests/benchmarks/embedded_cpu.py                                   # prompts of 600 tokens, answers of 200
python tests/benchmarks/embedded_cpu.py --words 3000 --tasks 1 --steps 1
python tests/benchmarks/embedded_cpu.py --shape tiny --words 100 --max-tokens 16      # a trial of this script
```

A Llama with random weights trains with `grpo` and its embedded server through the whole way: agents, rewards, ledger,
proofs. It makes model, tokenizer and tasks itself and needs no network. The reward is the share of small letters, see
`random_policy/plugin.py`: this shows that such a run goes through and what it costs, nothing about learning. Each step
must be there with all calls trained or accounted for, the weights must have changed, and the mean ratio of the server's
log-probabilities to the learner's must be near 1. A run also answers one held-out task before and after. With 3,000
tokens each of these takes the server about a minute on an idle core, as long as a step's rollouts. Peak memory is the
system's own figure for each process (VmHWM), shared libraries included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent / "random_policy"))
import killed
import plugin
import start

ROLES = {"agentrig_grpo.server": "server", "forkserver": "runners"}


def peaks(run: psutil.Process, found: dict[str, int]) -> None:
    """Raise the largest resident memory of a process of each kind, in bytes, to what it is now."""
    try:
        processes = [run, *run.children(recursive=True)]
    except psutil.Error:
        return
    for process in processes:
        try:
            words = " ".join(process.cmdline())
            status = Path(f"/proc/{process.pid}/status").read_text()
        except (psutil.Error, OSError):
            continue
        lines = [line.split() for line in status.splitlines() if line.startswith("VmHWM")]
        role = next((role for word, role in ROLES.items() if word in words), "run and learner")
        if lines:
            found[role] = max(found.get(role, 0), int(lines[0][1]) << 10)


def main() -> None:
    """Make the model, train, check and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(start.SHAPES), default="135m")
    parser.add_argument("--words", type=int, default=600, help="words, which are tokens, of a prompt")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--tasks", type=int, default=2, help="tasks of a step")
    parser.add_argument("--size", type=int, default=4, help="rollouts of a task")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--ratio", type=float, default=0.02, help="how far the mean ratio may be from 1")
    options, settings = parser.parse_known_args()
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="agentrig-cpu-") as made:
        folder = Path(made)
        model = folder / "model"
        parameters = start.make(
            model,
            family="llama",
            shape=options.shape,
            context=options.words + options.max_tokens + 64,
            texts=[plugin.paragraph(i, 400) for i in range(50)],
        )
        # Calls share a prompt only within one pass, so a task's calls must fit into it.
        budget = max(2048, options.words + options.size * options.max_tokens + 64)
        command = [
            sys.executable, "-m", "agentrig", "train", "--plugin", str(Path(plugin.__file__)), "--tasks", "paragraphs",
            "--agent", "reader", "--reward", "letters", "--adapter", "agent-match", "--algorithm", "grpo",
            "--hardware", "cpu", "adapter.match=reader", f"tasks.words={options.words}",
            f"tasks.tasks={max(options.tasks, 4)}", "run.report_tasks=1", "run.validation_tasks=1", "run.seed=0",
            f"algorithm.model={model}", f"algorithm.steps={options.steps}", f"algorithm.tasks_per_step={options.tasks}",
            f"algorithm.group_size={options.size}", f"algorithm.max_tokens={options.max_tokens}", "algorithm.lr=1e-5",
            "algorithm.validate_every=0", "algorithm.gradient_checkpointing=true",
            f"algorithm.tokens_per_batch={budget}",
            "runners.n=1", "runners.threads=32", "runners.deadline_s=3000", *killed.ONE_UPDATE,
            f"run.directory={folder}", "run.name=run", *settings,
        ]  # fmt: skip
        made_at = time.perf_counter()
        memory: dict[str, int] = {}
        with (folder / "log.txt").open("w") as log:
            run = psutil.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            while run.poll() is None:
                peaks(run, memory)
                time.sleep(0.2)
        if run.returncode:
            raise SystemExit(f"the run ended with {run.returncode}:\n{(folder / 'log.txt').read_text()[-4000:]}")
        trained_s = time.perf_counter() - made_at
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
        steps = [line["step_s"] for line in lines]
        print(killed.table(lines), flush=True)
        off = {line["step"]: line["algorithm"]["ratio_mean"] for line in lines}
        if len(off) != options.steps or any(abs(ratio - 1) > options.ratio for ratio in off.values()):
            raise SystemExit(f"the server's log-probabilities are not the learner's: mean ratios {off}")
        latest = sorted((folder / "run" / "checkpoints").glob("*/trainer"))[-1].parent
        changed = start.weights_differ(model, latest)
        if not changed:
            raise SystemExit("the last checkpoint holds the weights of the start")
        figures = {
            "parameters": parameters,
            "tensors that changed": changed,
            "seconds of a step by part": [
                {name: round(seconds, 1) for name, seconds in {**line["time_s"], "step": line["step_s"]}.items()}
                for line in lines
            ],
            "tokens computed and traced": [
                [int(line["algorithm"][f"{name}_tokens"]) for name in ("computed", "traced")] for line in lines
            ],
            "peak memory, GiB": {role: round(size / 2**30, 2) for role, size in sorted(memory.items())},
            "largest ratio": round(max(line["algorithm"]["ratio_max"] for line in lines), 4),
            "training_s": round(trained_s, 1),
            "of it outside the steps: start, report before and after": round(trained_s - sum(steps), 1),
            "wall_s": round(time.perf_counter() - begun, 1),
            "load": round(os.getloadavg()[0], 1),
        }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
