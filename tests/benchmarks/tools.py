"""A domain with three tools, from the shipped starter and from random weights: warm-up, then `grpo`; see tools.md.

    python tests/benchmarks/tools.py [--starts starter,new] [--seeds 0,1,2] [--out runs/tools] [section.key=value …]

Both starts get the same labels and as many steps; the new model has as many parameters as the starter. Limits are
steps, not minutes, so the load of the machine does not change what is learned. Prints `agentrig compare` of the runs.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from methods import agentrig

DOMAIN = ["inventory", "--plugin", str(Path(__file__).with_name("inventory.py"))]
WARMUP = ["--labels", "100", "--passes", "2", "--minutes", "60", "--tokens-per-batch", "2048", "--no-measure"]
STARTS = {"starter": [], "new": ["--parameters", "1.4e6"]}


def main() -> None:
    """Make the runs, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", default="starter,new")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path, default=Path("runs/tools"))
    parser.add_argument("words", nargs="*", help="settings of the runs")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    made, failed = [], []
    for seed in options.seeds.split(","):
        for start in options.starts.split(","):
            name, begun = f"{start}-{seed}", time.monotonic()
            model = options.out / f"{name}-model"
            where = [f"run.directory={options.out}", f"run.name={name}", f"run.seed={seed}", f"algorithm.model={model}"]
            with (options.out / f"{name}.log").open("wb") as log:
                words = ["warmup", *DOMAIN, *WARMUP, *STARTS[start], "--seed", seed, "--out", str(model)]
                status, warmed = agentrig(words, log=log), time.monotonic()
                words = ["train", *DOMAIN, *where, "--hardware", "cpu", "hardware.threads=2", *options.words]
                status = status or agentrig(words, log=log)
            (failed if status else made).append(str(options.out / name))
            print(
                f"{name}: exit status {status}, warm-up {warmed - begun:.0f} s, training and measurements "
                f"{time.monotonic() - warmed:.0f} s",
                flush=True,
            )
    status = agentrig(["compare", *made]) if made else 1
    sys.exit(f"these did not end well, see their logs: {', '.join(failed)}" if failed else status)


if __name__ == "__main__":
    main()
