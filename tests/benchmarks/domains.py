"""Train a domain of one's own from nothing, as docs/how-to/laptop.md tells: `agentrig warmup`, then `agentrig train`.

```
python tests/benchmarks/domains.py --seed 0 --cores 0,1 --json json-repair-0.json
python tests/benchmarks/domains.py --domain json-repair --seed 1 --json json-repair-1.json algorithm.steps=10
python tests/benchmarks/domains.py --figures json-repair-*.json          # the table of such runs
```

It runs the tree that it is in: sources and entry points go to PYTHONPATH, nothing is installed. It needs an environment
with the libraries of requirements/cpu.lock. Both commands are pinned to `--cores`, use the hardware `cpu`, and see no
CUDA device. Words after the options are settings of the training. `--keep DIR` keeps model and run directory. Prints
wall and CPU seconds, and the accuracy on the held-out tasks before and after; `--json FILE` has all figures. Runs on
separate cores may go on at the same time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs

ROOT = Path(__file__).resolve().parents[2]


@attrs.frozen(kw_only=True)
class Domain:
    """A domain under `examples/`: its recipe, and how its starting model is made."""

    recipe: str
    warmup: Sequence[str]


DOMAINS = {
    "units": Domain(
        recipe="units",
        warmup=(
            "--labels",
            "1000",
            "--parameters",
            "6e5",
            "--passes",
            "10",
            "--lr",
            "4e-3",
            "--tokens-per-batch",
            "1024",
            "--until",
            "0.15",
        ),
    ),
    "json-repair": Domain(
        recipe="json-repair",
        warmup=("--labels", "200", "--parameters", "3e5", "--passes", "15", "--until", "0.3"),
    ),
}


def environment(folder: Path) -> dict[str, str]:
    """Return the environment in which Python finds this tree's packages and their entry points."""
    parts = (*(ROOT / "plugins").glob("agentrig-*"), *(ROOT / "examples").glob("agentrig-*"))
    trees = [ROOT, *sorted(part for part in parts if (part / "pyproject.toml").is_file())]
    for tree in trees:
        project = tomllib.loads((tree / "pyproject.toml").read_text("utf-8"))["project"]
        info = folder / f"{re.sub('[-.]+', '_', project['name'])}-{project['version']}.dist-info"
        info.mkdir(parents=True)
        head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        needs = "".join(f"Requires-Dist: {line}\n" for line in project.get("dependencies", ()))
        (info / "METADATA").write_text(head + needs, "utf-8")
        points = project.get("entry-points", {})
        lines = [
            line
            for group, names in points.items()
            for line in (f"[{group}]", *(f"{n} = {v}" for n, v in names.items()))
        ]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n", "utf-8")
    path = [str(folder), *(str(tree / "src") for tree in trees), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "CUDA_VISIBLE_DEVICES": ""}


def measured(words: Sequence[str], place: Path, env: Mapping[str, str], cores: Sequence[int]) -> dict[str, Any]:
    """Run an agentrig command; return its wall and CPU seconds, and what it printed as JSON."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    pin = partial(os.sched_setaffinity, 0, cores) if cores else None
    with (place / "log.txt").open("a") as log:
        done = subprocess.run(
            [sys.executable, "-m", "agentrig", *words], stdout=subprocess.PIPE, stderr=log, text=True, cwd=place,
            env=dict(env), preexec_fn=pin, check=False,
        )  # fmt: skip
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(
            f"agentrig {' '.join(words)} ended with {done.returncode}:\n{(place / 'log.txt').read_text()[-3000:]}"
        )
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": wall, "cpu_s": cpu, "printed": json.loads(done.stdout)}


def trained(domain: Domain, place: Path, *, seed: int, cores: Sequence[int], settings: Sequence[str]) -> dict[str, Any]:
    """Make the starting model and train it; return the figures."""
    env = environment(place / "packages")
    model = place / "model"
    common = [domain.recipe, "--hardware", "cpu"]
    warm = measured(
        ["warmup", *common, *domain.warmup, "--seed", str(seed), "--out", str(model), "--json"], place, env, cores
    )
    own = [f"algorithm.model={model}", f"run.seed={seed}", f"run.directory={place}", "run.name=run"]
    run = measured(["train", *common, *own, *settings, "--json"], place, env, cores)
    accuracy = run["printed"]["accuracy"]
    return {
        "domain": domain.recipe,
        "seed": seed,
        "cores": list(cores),
        "settings": list(settings),
        "labels": len(warm["printed"]["labels"]),
        "parameters": warm["printed"]["model"]["parameters"],
        "after_warmup": warm["printed"]["after"],
        "before": accuracy["before"],
        "after": accuracy["after"],
        "n": accuracy["n"],
        "z": z_of(accuracy["before"], accuracy["after"], accuracy["n"]),
        "steps": run["printed"]["steps"],
        "rollouts": run["printed"]["rollouts"],
        "time_share": run["printed"]["time_share"],
        "wall_s": {"warmup": warm["wall_s"], "train": run["wall_s"], "both": warm["wall_s"] + run["wall_s"]},
        "cpu_s": {"warmup": warm["cpu_s"], "train": run["cpu_s"], "both": warm["cpu_s"] + run["cpu_s"]},
    }


def z_of(before: float, after: float, n: int) -> float:
    """Return the z of two proportions of n tasks each, as if the tasks were not the same: the gain over its error."""
    pooled = (before + after) / 2
    error = math.sqrt(max(2 * pooled * (1 - pooled) / n, 1e-12))
    return (after - before) / error


def table(files: Sequence[Path]) -> str:
    """Return the table of runs, for the docs."""
    rows = ["| domain | seed | before | after | gain | z | wall time | warm-up | CPU |", f"|{' --- |' * 9}"]
    for file in files:
        run = json.loads(file.read_text("utf-8"))
        wall = run["wall_s"]
        rows.append(
            f"| {run['domain']} | {run['seed']} | {run['before']:.1%} | {run['after']:.1%} | "
            f"{100 * (run['after'] - run['before']):+.1f} | {run['z']:.1f} | {wall['both'] / 60:.1f} min | "
            f"{wall['warmup']:.0f} s | {run['cpu_s']['both']:.0f} s |"
        )
    return "\n".join(rows)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--domain", default="json-repair", choices=sorted(DOMAINS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cores", default="", help="cores to run on, with commas between")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--keep", type=Path, help="new folder for model and run directory")
    parser.add_argument("--figures", type=Path, nargs="+", metavar="FILE", help="print the table of these runs")
    arguments, settings = parser.parse_known_args()
    if arguments.figures:
        print(table(arguments.figures))
        return
    if wrong := [word for word in settings if "=" not in word or word.startswith("-")]:
        parser.error(f"{wrong[0]} is neither an option nor a setting (section.key=value)")
    cores = [int(core) for core in arguments.cores.split(",") if core]
    with tempfile.TemporaryDirectory() as folder:
        place = arguments.keep.resolve() if arguments.keep else Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        found = trained(DOMAINS[arguments.domain], place, seed=arguments.seed, cores=cores, settings=settings)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    wall, cpu = found["wall_s"], found["cpu_s"]
    print(
        f"{found['domain']}, seed {found['seed']}: {found['before']:.1%} to {found['after']:.1%} of {found['n']} "
        f"held-out tasks (z {found['z']:.1f}); wall {wall['both']:.0f} s (warm-up {wall['warmup']:.0f}), "
        f"CPU {cpu['both']:.0f} s"
    )


if __name__ == "__main__":
    main()
