"""Time `agentrig train mini`: wall time, CPU time by process, and the accuracy reached.

```
python tests/benchmarks/train_wall.py --seeds 3 --json new.json
python tests/benchmarks/train_wall.py --seeds 1 algorithm.steps=4 run.report_tasks=64
python tests/benchmarks/train_wall.py --seed 2 --cores 4,5 --json new-2.json     # one run on two cores
python tests/benchmarks/train_wall.py --figures old.json new.json                # medians of each, beside the first
```

It measures the agentrig of this Python, so run it in the environment of each of two checkouts, their seeds in turns,
to compare them. CPU time is that of all processes, read every quarter of a second, so on a machine with other work it
says more than wall time. `--cores` pins a run, not this script: runs on separate cores may go on at the same time. Runs
use the hardware `cpu`. Words after the options are settings of the run. Prints a line a run and the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

ROLES = {"agentrig_grpo.server": "server", "forkserver": "runners"}
"""A word of a process's command line, and what the process does; the others are the run itself."""
PARTS = ("rollout", "reward", "update", "push", "delivery", "validation", "audit")


def measured(command: Sequence[str], log: Path, cores: Sequence[int]) -> tuple[float, dict[str, float]]:
    """Run a command; return its wall seconds, and the CPU seconds of its processes by what they do."""
    used: dict[int, tuple[str, float]] = {}
    start = time.perf_counter()
    with log.open("w") as out:
        # Pinned between fork and exec: this script's own reading of times must not take the run's cores.
        pin = partial(os.sched_setaffinity, 0, cores) if cores else None
        run = psutil.Popen(command, stdout=out, stderr=out, cwd=log.parent, preexec_fn=pin)
    while run.poll() is None:
        for process in [run, *_below(run)]:
            try:
                times, words = process.cpu_times(), " ".join(process.cmdline())
            except psutil.Error:
                continue
            role = next((role for word, role in ROLES.items() if word in words), "run")
            used[process.pid] = role if words else used.get(process.pid, (role,))[0], times.user + times.system
        time.sleep(0.25)
    wall = time.perf_counter() - start
    if run.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {run.returncode}:\n{log.read_text()[-2000:]}")
    cpu: dict[str, float] = defaultdict(float)
    for role, seconds in used.values():
        cpu[role] += seconds
    return wall, dict(cpu)


def _below(run: psutil.Process) -> list[psutil.Process]:
    try:
        return run.children(recursive=True)
    except psutil.Error:
        return []


def trained(folder: Path, seed: int, words: Sequence[str], cores: Sequence[int] = ()) -> dict[str, Any]:
    folder.mkdir()
    settings = [f"run.seed={seed}", f"run.directory={folder}", "run.name=run", *words]
    command = [sys.executable, "-m", "agentrig", "train", "mini", "--hardware", "cpu", *settings]
    wall, cpu = measured(command, folder / "log.txt", cores)
    summary = json.loads((folder / "run" / "summary.json").read_text("utf-8"))
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    steps = {part: sum(line["time_s"].get(part, 0.0) for line in lines) for part in PARTS}
    other = sum(line["step_s"] for line in lines) - sum(steps.values())
    return {
        "seed": seed,
        "wall_s": wall,
        "cpu_s": sum(cpu.values()),
        "before": summary["accuracy"]["before"],
        "after": summary["accuracy"]["after"],
        "cpu": cpu,
        "parts_s": {**steps, "rest of the steps": other, "outside the steps": wall - sum(steps.values()) - other},
    }


def shown(found: Mapping[str, Any]) -> str:
    """Return a run's figures as a line."""
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in found["parts_s"].items())
    cpu = ", ".join(f"{name} {seconds:.1f}" for name, seconds in sorted(found["cpu"].items()))
    return (
        f"wall {found['wall_s']:.1f} s, CPU {found['cpu_s']:.1f} s ({cpu}), accuracy {found['before']:.1%} to "
        f"{found['after']:.1%}; seconds: {parts}"
    )


def median(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the medians of some runs' figures."""
    figures: dict[str, Any] = {n: statistics.median(r[n] for r in runs) for n in ("wall_s", "cpu_s", "before", "after")}
    for table in ("cpu", "parts_s"):
        figures[table] = {n: statistics.median(r[table].get(n, 0.0) for r in runs) for n in runs[0][table]}
    return figures


def printed(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Print the medians of each file's runs, and their share of the first file's."""
    medians = {name: median(found) for name, found in runs.items()}
    first, beside = next(iter(medians.values())), next(iter(medians))
    print(f"medians; {os.cpu_count()} cores, load now {os.getloadavg()[0]:.1f}")
    for name, found in medians.items():
        share = f"wall {found['wall_s'] / first['wall_s']:.0%}, CPU {found['cpu_s'] / first['cpu_s']:.0%}"
        print(f"{name}, {len(runs[name])} runs: {shown(found)}; of {beside}: {share}")


def cores_of(text: str) -> list[int]:
    """Return the cores that a word such as `0,1` names."""
    try:
        cores = [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of cores such as 0,1") from None
    if absent := set(cores) - os.sched_getaffinity(0):
        raise argparse.ArgumentTypeError(f"this process may not use the cores {sorted(absent)}")
    return cores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 to N - 1")
    parser.add_argument("--seed", action="append", type=int, help="this seed; may be repeated; in place of --seeds")
    parser.add_argument("--cores", type=cores_of, default=(), help="cores of the runs, as 0,1; without it all")
    parser.add_argument("--json", type=Path, help="a file for all figures")
    parser.add_argument("--figures", type=Path, nargs="+", help="compare such files, and run nothing")
    given, words = parser.parse_known_args()
    if wrong := [word for word in words if word.startswith("-") or "=" not in word]:
        parser.error(f"{' '.join(wrong)} is no setting: write section.key=value")
    if given.figures:
        printed({file.name: json.loads(file.read_text("utf-8")) for file in given.figures})
        return
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="train-wall-") as made:
        for seed in given.seed or range(given.seeds):
            runs.append(trained(Path(made) / str(seed), seed, words, given.cores))
            print(f"seed {seed}: {shown(runs[-1])}", flush=True)
            if given.json:
                given.json.write_text(json.dumps(runs, indent=1), "utf-8")
    printed({"these runs": runs})


if __name__ == "__main__":
    main()
