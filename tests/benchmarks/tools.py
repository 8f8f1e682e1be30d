"""A domain with three tools, from the shipped starter and from random weights: warm-up, then `grpo`; see tools.md.

    python tests/benchmarks/tools.py [--starts starter,new] [--seeds 0,1,2] [--at-once 1] [--out runs/tools] \
        [--file FILE] [section.key=value …]

Both starts get the same labels and as many steps; the new model has as many parameters as the starter. Limits are
steps, not minutes, so the load of the machine does not change what is learned. Runs, table and file are made as in
`methods.py`: a run that ended is kept. From random weights a run ends early if all its rewards are 0: its measurement
before training is in the table, and the exit status is 1.
"""

from __future__ import annotations

from pathlib import Path

from methods import Job, arguments, make, parsed

DOMAIN = ["inventory", "--plugin", str(Path(__file__).with_name("inventory.py"))]
WARMUP = ["--labels", "100", "--passes", "2", "--minutes", "60", "--tokens-per-batch", "2048", "--no-measure"]
STARTS = {"starter": [], "new": ["--parameters", "1.4e6"]}


def main() -> None:
    parser = arguments(__doc__, "runs/tools")
    parser.add_argument("--starts", default="starter,new")
    options, say = parsed(parser)
    jobs: dict[str, Job] = {}
    for seed in options.seeds.split(","):
        for start in options.starts.split(","):
            if start not in STARTS:
                parser.error(f"--starts are some of {', '.join(STARTS)}, not {start!r}")
            model = options.out / f"{start}-{seed}-model"
            jobs[f"{start}-{seed}"] = Job(
                [*DOMAIN, f"run.seed={seed}", f"algorithm.model={model.resolve()}", *options.words],
                warmup=[*DOMAIN, *WARMUP, *STARTS[start], "--seed", seed],
                model=model,
            )
    make(jobs, options, say)


if __name__ == "__main__":
    main()
