"""Compare runs of recipe `mini` with `max_staleness` 0 and 1: held-out accuracy, wall time, CPU time.

```
python tests/benchmarks/overlap.py --seeds 3 --cores 0,1 --json overlap.json
python tests/benchmarks/overlap.py --seed 0 --cores 0,1 --json o-0.json        # one seed on one pair of cores; others
python tests/benchmarks/overlap.py --seed 1 --cores 2,3 --json o-1.json        # may run on other pairs at the same time
python tests/benchmarks/overlap.py --figures o-0.json o-1.json o-2.json        # the comparison of such runs
python tests/benchmarks/overlap.py --seeds 1 --cores 0,1 algorithm.steps=4 run.report_tasks=64
```

It measures the agentrig that is installed beside the Python that runs it. Both runs of a seed follow each other, and
the next seed begins with the other one. `--cores` pins a run, not this script. Wall time says something on an idle
machine only; CPU time is that of all processes. Words after the options are settings of both runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from train_wall import Installed, cores_of, median, shown, trained

ALLOWED = (0, 1)
"""The values of `algorithm.max_staleness`."""


def run(folder: Path, seed: int, staleness: int, words: Sequence[str], cores: Sequence[int]) -> dict[str, Any]:
    """Train once; return the figures."""
    command = Installed([sys.executable, "-P", "-m", "agentrig"], dict(os.environ))
    found = trained(command, folder, seed, [f"algorithm.max_staleness={staleness}", *words], cores)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    stale = [line for line in lines if line["max_staleness"]]
    weights = [line["algorithm"]["rollout_is_ratio_fraction_high"] for line in stale if line["algorithm"]["updates"]]
    return {
        **found,
        "steps_s": sum(line["step_s"] for line in lines),
        "steps": len(lines),
        "stale_steps": len(stale),
        "overlap_s": sum(line.get("overlap_s", 0.0) for line in lines),
        "truncated": statistics.fmean(weights) if weights else 0.0,
        "n": json.loads((folder / "run" / "summary.json").read_text("utf-8"))["accuracy"]["n"],
    }


def compared(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Print the runs of both settings, their medians, and their differences seed by seed."""
    print(f"{os.cpu_count()} cores, load now {os.getloadavg()[0]:.1f}")
    for name, found in runs.items():
        after = [one["after"] for one in found]
        accuracies = ", ".join(f"{share:.1%}" for share in after)
        deviation = f", deviation {statistics.stdev(after):.1%}" if len(after) > 1 else ""
        steps = statistics.median(one["steps_s"] / one["steps"] for one in found)
        print(
            f"max_staleness {name}: {len(found)} runs, held-out accuracy {accuracies} (n = {found[0]['n']}), mean",
            end="",
        )
        print(f" {statistics.fmean(after):.1%}{deviation}; {steps:.2f} s a step; medians: {shown(median(found))}")
        if any(one["stale_steps"] for one in found):
            hidden = statistics.median(one["overlap_s"] for one in found)
            cut = statistics.fmean(one["truncated"] for one in found)
            print(f"  {hidden:.1f} s of rollouts ran during updates; {cut:.2%} of stale tokens had a truncated weight")
    fresh, stale = ({one["seed"]: one for one in runs.get(str(n), ())} for n in ALLOWED)
    for seed in sorted(fresh.keys() & stale.keys()):
        was, now = fresh[seed], stale[seed]
        wall, steps = now["wall_s"] / was["wall_s"], now["steps_s"] / was["steps_s"]
        accuracy = now["after"] - was["after"]
        print(f"seed {seed}: 1 compared with 0: wall {wall:.0%}, steps {steps:.0%}, accuracy {accuracy:+.1%}")


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 to N - 1")
    parser.add_argument("--seed", action="append", type=int, help="this seed; may be repeated; in place of --seeds")
    parser.add_argument("--cores", type=cores_of, default=(), help="cores of the runs, as 0,1; without it all")
    parser.add_argument("--json", type=Path, help="a file for all figures")
    parser.add_argument("--figures", type=Path, nargs="+", help="compare the runs in such files, and run nothing")
    given, words = parser.parse_known_args()
    if wrong := [word for word in words if word.startswith("-") or "=" not in word]:
        parser.error(f"{' '.join(wrong)} is no setting: write section.key=value")
    runs: dict[str, list[dict[str, Any]]] = {str(n): [] for n in ALLOWED}
    for file in given.figures or ():
        for name, found in json.loads(file.read_text("utf-8")).items():
            runs[name] += found
    if given.figures:
        compared(runs)
        return
    with tempfile.TemporaryDirectory(prefix="overlap-") as made:
        for turn, seed in enumerate(given.seed or range(given.seeds)):
            for staleness in ALLOWED if turn % 2 == 0 else reversed(ALLOWED):
                folder = Path(made) / f"{staleness}-{seed}"
                runs[str(staleness)].append(run(folder, seed, staleness, words, given.cores))
                print(f"max_staleness {staleness}, seed {seed}: {shown(runs[str(staleness)][-1])}", flush=True)
                if given.json:
                    given.json.write_text(json.dumps(runs, indent=1), "utf-8")
    compared(runs)


if __name__ == "__main__":
    main()
