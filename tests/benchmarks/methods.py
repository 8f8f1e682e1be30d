"""One agent and one reward, improved by each method: the runs of the table in methods.md, and that table.

    python tests/benchmarks/methods.py --model DIR [--seeds 0,1,2] [--at-once 1] [--out runs] [--turns]

DIR is a model from before the labels: `make_mini.py --out DIR/.. --labelled 0` writes it as `stage-1`
(plugins/agentrig-grpo/training). `--turns` makes the runs of credit by turn instead, from the shipped model. Each run
has two cores of its own, so `--at-once` is at most half of the cores. Prints `agentrig compare` of all runs at the
end, and fails if a run does not end well.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

SFT = ["--algorithm", "sft", "run.train_tasks=600", "algorithm.steps=40", "algorithm.lr=5e-4"]
"""Labels of 600 tasks, 6.4 times each."""

METHODS = {"sft": SFT, "rft": ["--credit", "rft"], "grpo": []}
AFTER = {"sft-grpo": "sft", "rft-grpo": "rft"}
TURNS = {"whole": ["agent.max_turns=3"], "turn": ["--credit", "turn", "agent.max_turns=3"]}


def main() -> None:
    """Make the runs, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="the directory of the first model")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--turns", action="store_true")
    options = parser.parse_args()
    if not (options.turns or options.model):
        parser.error("name the first model: --model DIR")
    jobs: dict[str, tuple[list[str], str]] = {}
    for seed in options.seeds.split(","):
        first = [] if options.turns else [f"algorithm.model={options.model.resolve()}"]
        for name, words in (TURNS if options.turns else METHODS).items():
            jobs[f"{name}-{seed}"] = [*words, *first, f"run.seed={seed}"], ""
        for name, before in {} if options.turns else AFTER.items():
            start = options.out / f"{before}-{seed}"
            jobs[f"{name}-{seed}"] = ["--start", str(start), f"run.seed={seed}"], start.name
    names = list(jobs)
    failed = run_all(jobs, options.out, options.at_once)
    if failed:
        sys.exit(f"these runs did not end well: {', '.join(failed)}; see their logs in {options.out}")
    sys.exit(agentrig(["compare", *(str(options.out / name) for name in names)]))


def run_all(jobs: dict[str, tuple[list[str], str]], out: Path, at_once: int) -> list[str]:
    """Run the jobs, each after the run that it starts from; return the names of those that failed."""
    out.mkdir(parents=True, exist_ok=True)
    ended: dict[str, int] = {}
    lock = threading.Lock()

    def work(place: int) -> None:
        while True:
            with lock:
                name = next((name for name, (_, after) in jobs.items() if not after or after in ended), None)
                words = jobs.pop(name)[0] if name is not None else []
            if name is None:
                if not jobs:
                    return
                time.sleep(1)
                continue
            begun = time.monotonic()
            where = [f"run.directory={out}", f"run.name={name}", "--hardware", "cpu", "hardware.threads=2"]
            with (out / f"{name}.log").open("wb") as log:
                status = agentrig(["train", "mini", *words, *where], log=log, cores={2 * place, 2 * place + 1})
            with lock:
                ended[name] = status
            print(f"{name}: exit status {status}, {time.monotonic() - begun:.0f} s", flush=True)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [name for name, status in ended.items() if status]


def agentrig(words: Sequence[str], log: object = None, cores: set[int] | None = None) -> int:
    """Run a command of agentrig on some cores, and return its exit status."""
    command = [sys.executable, "-m", "agentrig", *words]
    process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)  # type: ignore[call-overload]
    if cores is not None:
        os.sched_setaffinity(process.pid, cores)
    return int(process.wait())


if __name__ == "__main__":
    main()
