"""Time `agentrig train mini` at several commits: wall time, CPU time by process, and the accuracy reached.

```
python tests/benchmarks/train_wall.py --commit 9751d2c --commit HEAD --seeds 3
python tests/benchmarks/train_wall.py --commit HEAD~1 --commit HEAD --seeds 1 algorithm.steps=4 run.report_tasks=64
python tests/benchmarks/train_wall.py --source old=DIR --seed 2 --cores 4,5 --json old-2.json     # one run on two cores
python tests/benchmarks/train_wall.py --figures old-0.json new-0.json old-1.json …                # medians of such runs
```

Each commit is built and installed in a virtual environment of its own. The libraries in it are links to those of the
Python that runs this script, and folders on PYTHONPATH stay there without what they have of agentrig. So all commits
compute with the same libraries, and a commit with other requirements may fail. `--source NAME=DIR` measures an
unpacked `git archive` where there is no git. The runs of a seed follow each other, the commits in turns, and the next
seed begins with another commit. CPU time is that of all processes, read every quarter of a second, so on a machine with
other work it says more than wall time. `--cores` pins a run, not this script: runs on separate cores may go on at the
same time. Runs use the hardware `cpu`. Words after the options are settings of the run. Prints a line a run and the
medians; `--json FILE` keeps everything. It needs hatchling and pip or uv, and no network.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs
import psutil

ROOT = Path(__file__).resolve().parents[2]
ROLES = {"agentrig_grpo.server": "server", "forkserver": "runners"}
"""A word of a process's command line, and what the process does; the others are the run itself."""
PARTS = ("rollout", "reward", "update", "push", "delivery", "validation")


@contextmanager
def checked_out(commit: str, folder: Path) -> Iterator[Path]:
    """Give the sources of a commit, in a worktree that ends with the block."""
    name = subprocess.check_output(["git", "rev-parse", "--short", commit], cwd=ROOT, text=True).strip()
    tree = folder / name
    subprocess.run(["git", "worktree", "add", "-q", "--detach", str(tree), name], cwd=ROOT, check=True)
    try:
        yield tree
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


@attrs.frozen
class Installed:
    """A commit's command, and the environment that it needs."""

    command: Sequence[str]
    environment: Mapping[str, str]


def installed(tree: Path, folder: Path) -> Installed:
    """Build and install a tree's distributions beside links to this Python's libraries, in a new folder."""
    if find_spec("hatchling") is None:
        raise SystemExit("hatchling is missing, which builds agentrig: pip install hatchling")
    if not (tree / "plugins").is_dir():
        raise SystemExit(f"{tree} has no folder plugins: name a folder in which a commit's files are")
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    for path in {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}:
        _link(Path(path), packages)
    others = []
    for i, path in enumerate(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if path and Path(path).is_dir():
            linked = folder / f"path-{i}"
            linked.mkdir()
            _link(Path(path), linked)
            others.append(str(linked))
    sources = [str(tree), *map(str, sorted((tree / "plugins").glob("agentrig-*")))]
    options = ["-q", "--no-deps", "--no-build-isolation", "--target", str(packages), *sources]
    if find_spec("pip") is not None:
        install = [sys.executable, "-m", "pip", "install", "--no-index", "--disable-pip-version-check", *options]
    elif (uv := shutil.which("uv")) is not None:
        install = [uv, "pip", "install", "--offline", "--python", sys.executable, *options]
    else:
        raise SystemExit("pip and uv are missing, one of which installs agentrig: python -m ensurepip")
    subprocess.run(install, check=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(others)}
    python = str(venv / "bin" / "python")
    asked = "import agentrig, agentrig_grpo; print(agentrig.__file__, agentrig_grpo.__file__)"
    found = subprocess.check_output([python, "-P", "-c", asked], env=environment, text=True).split()
    if wrong := [path for path in found if not Path(path).is_relative_to(venv)]:
        raise SystemExit(f"not the sources of {tree} would be measured, but {', '.join(wrong)}")
    return Installed([python, "-P", "-m", "agentrig"], environment)


def _link(packages: Path, into: Path) -> None:
    """Link what is in a folder of packages, except agentrig, into another one."""
    for entry in packages.iterdir():
        if "agentrig" not in entry.name and not (into / entry.name).exists():
            (into / entry.name).symlink_to(entry.absolute())


def measured(
    command: Sequence[str], log: Path, environment: Mapping[str, str], cores: Sequence[int]
) -> tuple[float, dict[str, float]]:
    """Run a command; return its wall seconds, and the CPU seconds of its processes by what they do."""
    used: dict[int, tuple[str, float]] = {}
    start = time.perf_counter()
    with log.open("w") as out:
        # Pinned between fork and exec: this script's own reading of times must not take the run's cores.
        pin = partial(os.sched_setaffinity, 0, cores) if cores else None
        run = psutil.Popen(command, stdout=out, stderr=out, env=environment, cwd=log.parent, preexec_fn=pin)
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


def trained(
    agentrig: Installed, folder: Path, seed: int, words: Sequence[str], cores: Sequence[int] = ()
) -> dict[str, Any]:
    """Train once; return the figures."""
    folder.mkdir()
    settings = [f"run.seed={seed}", f"run.directory={folder}", "run.name=run", *words]
    command = [*agentrig.command, "train", "mini", "--hardware", "cpu", *settings]
    wall, cpu = measured(command, folder / "log.txt", agentrig.environment, cores)
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
    """Print the medians of each commit's runs, and their share of the first commit's."""
    medians = {commit: median(found) for commit, found in runs.items()}
    first, name = next(iter(medians.values())), next(iter(medians))
    print(f"medians; {os.cpu_count()} cores, load now {os.getloadavg()[0]:.1f}")
    for commit, found in medians.items():
        share = f"wall {found['wall_s'] / first['wall_s']:.0%}, CPU {found['cpu_s'] / first['cpu_s']:.0%}"
        print(f"{commit}, {len(runs[commit])} runs: {shown(found)}; of {name}: {share}")


def collected(files: Sequence[Path]) -> dict[str, list[dict[str, Any]]]:
    """Return the runs of several files of figures."""
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for file in files:
        for commit, found in json.loads(file.read_text("utf-8")).items():
            runs[commit] += found
    return runs


def _source(text: str) -> tuple[str, Path]:
    name, _, folder = text.partition("=")
    if not folder or not Path(folder).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=DIR with a folder that exists")
    return name, Path(folder).absolute()


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
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", action="append", default=[], help="may be repeated; the first is the reference")
    parser.add_argument("--source", action="append", default=[], type=_source, help="NAME=DIR: unpacked files")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 to N - 1")
    parser.add_argument("--seed", action="append", type=int, help="this seed; may be repeated; in place of --seeds")
    parser.add_argument("--cores", type=cores_of, default=(), help="cores of the runs, as 0,1; without it all")
    parser.add_argument("--json", type=Path, help="a file for all figures")
    parser.add_argument("--figures", type=Path, nargs="+", help="print the medians of such files, and run nothing")
    given, words = parser.parse_known_args()
    if wrong := [word for word in words if word.startswith("-") or "=" not in word]:
        parser.error(f"{' '.join(wrong)} is no setting: write section.key=value")
    if given.figures:
        printed(collected(given.figures))
        return
    if not given.commit and not given.source:
        parser.error("name a --commit or a --source")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in [*given.commit, *(name for name, _ in given.source)]}
    with tempfile.TemporaryDirectory(prefix="train-wall-") as made, ExitStack() as trees:
        folder = Path(made)
        sources = {name: trees.enter_context(checked_out(name, folder)) for name in given.commit} | dict(given.source)
        ready = {}
        for i, (name, tree) in enumerate(sources.items()):
            (folder / f"built-{i}").mkdir()
            ready[name] = installed(tree, folder / f"built-{i}")
        for turn, seed in enumerate(given.seed or range(given.seeds)):
            first = turn % len(ready)
            for name in [*ready][first:] + [*ready][:first]:
                place = folder / f"run-{[*ready].index(name)}-{seed}"
                runs[name].append(trained(ready[name], place, seed, words, given.cores))
                print(f"{name} seed {seed}: {shown(runs[name][-1])}", flush=True)
                if given.json:
                    given.json.write_text(json.dumps(runs, indent=1), "utf-8")
    printed(runs)


if __name__ == "__main__":
    main()
