"""Time `agentrig train mini` at several commits, in turns: wall time, CPU time by process, and the accuracy reached.

```
python tests/benchmarks/train_wall.py --commit 9751d2c --commit HEAD --seeds 3
python tests/benchmarks/train_wall.py --commit HEAD~1 --commit HEAD --seeds 1 algorithm.steps=4 run.report_tasks=64
```

Each commit is a worktree with a virtual environment of its own. The libraries in it are links to those of the Python
that runs this script, so that all commits compute with the same ones, and a commit with other requirements may fail.
The runs of a seed follow each other, the commits in turns, and the next seed begins with another commit. CPU time is
that of all processes, read every quarter of a second, so on a machine with other work it says more than wall time.
Words after the options are settings of the run. Prints a line a run and the medians; `--json FILE` keeps everything.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
ROLES = {"agentrig_grpo.server": "server", "forkserver": "runners"}
"""A word of a process's command line, and what the process does; the others are the run itself."""
PARTS = ("rollout", "reward", "update", "push", "delivery", "validation")


@contextmanager
def checked_out(commit: str, folder: Path) -> Iterator[Path]:
    """Give a commit's command `agentrig`, in a worktree and a virtual environment that end with the block."""
    name = subprocess.check_output(["git", "rev-parse", "--short", commit], cwd=ROOT, text=True).strip()
    tree = folder / name
    subprocess.run(["git", "worktree", "add", "-q", "--detach", str(tree), name], cwd=ROOT, check=True)
    try:
        yield installed(tree)
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


def installed(tree: Path) -> Path:
    """Install a tree's distributions beside links to this Python's libraries; return the command `agentrig`."""
    venv = tree / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "agentrig" not in entry.name:
            (packages / entry.name).symlink_to(entry)
    python = venv / "bin" / "python"
    sources = [tree, *sorted((tree / "plugins").glob("agentrig-*"))]
    command = ["uv", "pip", "install", "-q", "--offline", "--no-deps", "--no-build-isolation", "--python", str(python)]
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        command + [word for s in sources for word in ("-e", str(s))], check=True, env={**os.environ, "PATH": beside}
    )
    return venv / "bin" / "agentrig"


def measured(command: Sequence[str], log: Path) -> tuple[float, dict[str, float]]:
    """Run a command; return its wall seconds, and the CPU seconds of its processes by what they do."""
    used: dict[int, tuple[str, float]] = {}
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    start = time.perf_counter()
    with log.open("w") as out:
        run = psutil.Popen(command, stdout=out, stderr=out, env=environment, cwd=log.parent)
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


def trained(agentrig: Path, folder: Path, seed: int, words: Sequence[str]) -> dict[str, Any]:
    """Train once; return the figures."""
    folder.mkdir()
    command = [str(agentrig), "train", "mini", f"run.seed={seed}", f"run.directory={folder}", "run.name=run", *words]
    wall, cpu = measured(command, folder / "log.txt")
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


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", action="append", required=True, help="may be repeated; the first is the reference")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 to N - 1")
    parser.add_argument("--json", type=Path, help="a file for all figures")
    given, words = parser.parse_known_args()
    if wrong := [word for word in words if word.startswith("-") or "=" not in word]:
        parser.error(f"{' '.join(wrong)} is no setting: write section.key=value")
    runs: dict[str, list[dict[str, Any]]] = {commit: [] for commit in given.commit}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for seed in range(given.seeds):
            turn = seed % len(given.commit)
            for commit in given.commit[turn:] + given.commit[:turn]:
                with checked_out(commit, folder) as agentrig:
                    found = trained(agentrig, folder / f"{commit.replace('/', '-')}-{seed}", seed, words)
                runs[commit].append(found)
                print(f"{commit} seed {seed}: {shown(found)}", flush=True)
                if given.json:
                    given.json.write_text(json.dumps(runs, indent=1), "utf-8")
    medians = {commit: median(found) for commit, found in runs.items()}
    first = medians[given.commit[0]]
    print(f"medians of {given.seeds} seeds, {os.cpu_count()} cores, load now {os.getloadavg()[0]:.1f}")
    for commit, found in medians.items():
        share = f"wall {found['wall_s'] / first['wall_s']:.0%}, CPU {found['cpu_s'] / first['cpu_s']:.0%}"
        print(f"{commit}: {shown(found)}; of {given.commit[0]}: {share}")


if __name__ == "__main__":
    main()
