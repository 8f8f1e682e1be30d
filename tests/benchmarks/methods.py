"""One agent and one reward, improved by each method: the runs of the table in methods.md, and that table.

    python tests/benchmarks/methods.py --model DIR [--seeds 0,1,2] [--at-once 1] [--out runs] [--file FILE] [--turns]
    python tests/benchmarks/methods.py --recipe units [--model DIR] …

DIR is a model from before the labels. For `mini`, `make_mini.py --out DIR/.. --labelled 0` writes it as `stage-1`
(plugins/agentrig-grpo/training). For `units`, `agentrig warmup` makes it first, as `start` in the folder of `--out`:
from random weights, with 300 of the 600 labels that `sft` gets, until it is right in 15% of its samples.

`--turns` makes the runs of credit by turn instead, from the shipped model of `mini`. Each run has two cores of its own,
so `--at-once` is at most half of the cores that `taskset` leaves the script. A run of an earlier call is kept if it is
complete, and goes on from its last checkpoint if it is not. Words such as `algorithm.steps=10` at the end are for every
run.

Prints `agentrig compare` at the end, by method and run by run, with costs at `--hour` for an hour of two cores.
`--file` writes the same into one text file. Fails if a run does not end well.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import attrs

SOURCE = Path(__file__).resolve().parents[2] / "examples" / "agentrig-units" / "src"


@attrs.frozen
class Recipe:
    """What the methods are tried on.

    Attributes:
        sft: Words of its `sft`: labels of 600 tasks.
        warmup: Words of the `agentrig warmup` that makes the model before the labels, if none is given.
        source: The folder of the plugin's module `agentrig_NAME`, for where it is not installed.
    """

    sft: Sequence[str]
    warmup: Sequence[str] = ()
    source: Path | None = None


RECIPES: Mapping[str, Recipe] = {
    "mini": Recipe(["run.train_tasks=600", "algorithm.steps=40", "algorithm.lr=5e-4"]),
    "units": Recipe(
        ["run.train_tasks=600", "algorithm.steps=40", "algorithm.lr=5e-4"],
        [
            *("run.train_tasks=600", "--labels", "300", "--model", "new", "--parameters", "6e5", "--lr", "4e-3"),
            *("--threads", "2", "--tokens-per-batch", "1024", "--passes", "24", "--until", "0.15", "--minutes", "5"),
        ],
        SOURCE,
    ),
}
METHODS = {"sft": ["--algorithm", "sft"], "rft": ["--credit", "rft"], "grpo": []}
AFTER = {"sft-grpo": "sft", "rft-grpo": "rft"}
TURNS = {"whole": ["agent.max_turns=3"], "turn": ["--credit", "turn", "agent.max_turns=3"]}


def main() -> None:
    """Make the runs, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="section.key=value of every run")
    parser.add_argument("--recipe", choices=list(RECIPES), default="mini")
    parser.add_argument("--model", type=Path, help="the directory of the first model")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--turns", action="store_true")
    parser.add_argument("--hour", type=float, default=0.1, help="price of an hour of two cores, USD; %(default)s")
    parser.add_argument("--file", type=Path, help="a text file for what is printed")
    options = parser.parse_args()
    recipe, start, lines = RECIPES[options.recipe], options.model, list[str]()
    if options.turns and options.recipe != "mini":
        parser.error("--turns is for mini")
    options.out.mkdir(parents=True, exist_ok=True)

    def say(text: str) -> None:
        print(text, flush=True)
        lines.append(text)
        if options.file is not None:
            options.file.write_text("\n".join(lines) + "\n", "utf-8")

    where = [options.recipe]
    if recipe.source is not None and importlib.util.find_spec(f"agentrig_{options.recipe}") is None:
        where += ["--plugin", str(recipe.source / f"agentrig_{options.recipe}" / "__init__.py")]
        os.environ["PYTHONPATH"] = os.pathsep.join([str(recipe.source), *filter(None, [os.environ.get("PYTHONPATH")])])
    if start is None and not options.turns:
        if not recipe.warmup:
            parser.error("name the first model: --model DIR")
        start = options.out / "start"
        if not start.is_dir():
            status, said = agentrig(["warmup", *where, *recipe.warmup, "--out", str(start)])
            say(said)
            if status:
                sys.exit(status)
    jobs: dict[str, tuple[list[str], str]] = {}
    for seed in options.seeds.split(","):
        first = [] if options.turns else [f"algorithm.model={start.resolve()}"]
        for name, words in (TURNS if options.turns else METHODS).items():
            more = recipe.sft if name == "sft" else ()
            jobs[f"{name}-{seed}"] = [*where, *words, *more, *first, f"run.seed={seed}", *options.words], ""
        for name, before in {} if options.turns else AFTER.items():
            from_run = ["--start", str(options.out / f"{before}-{seed}")]
            jobs[f"{name}-{seed}"] = [*where, *from_run, f"run.seed={seed}", *options.words], f"{before}-{seed}"
    names = list(jobs)
    failed = run_all(jobs, options.out, options.at_once, say)
    if failed:
        sys.exit(f"these runs did not end well: {', '.join(failed)}; see their logs in {options.out}")
    runs = [str(options.out / name) for name in names]
    status, said = agentrig(["compare", "--json", *runs])
    if status:
        sys.exit(status)
    prices = options.out / "prices.toml"
    machines = sorted({run["machine"] for run in json.loads(said)["runs"]})
    priced = [f"[machines.{json.dumps(machine)}]\nhour = {options.hour}\n" for machine in machines]
    prices.write_text("\n".join(['currency = "USD"\n', *priced]), "utf-8")
    for more in ([], ["--each"]):
        status, said = agentrig(["compare", "--prices", str(prices), *more, *runs])
        say(said)
        if status:
            sys.exit(status)


def run_all(
    jobs: dict[str, tuple[list[str], str]], out: Path, at_once: int, say: Callable[[str], None] = print
) -> list[str]:
    """Run the jobs, each after the run that it starts from; return the names of those that failed."""
    ended: dict[str, int] = {}
    lock = threading.Lock()
    free = sorted(os.sched_getaffinity(0))

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
            begun, status, summary = time.monotonic(), 0, out / name / "summary.json"
            if not (summary.is_file() and json.loads(summary.read_bytes()).get("complete")):
                command = ["train", *words, f"run.directory={out}", f"run.name={name}", "--hardware", "cpu"]
                command += ["hardware.threads=2"]
                if (out / name / "config.toml").is_file():
                    command = ["train", "--resume", str(out / name)]
                status, _ = agentrig(command, out / f"{name}.log", set(free[2 * place : 2 * place + 2]))
            with lock:
                ended[name] = status
                say(f"{name}: exit status {status}, {time.monotonic() - begun:.0f} s")

    threads = [threading.Thread(target=work, args=(place,)) for place in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [name for name, status in ended.items() if status]


def agentrig(words: Sequence[str], log: Path | None = None, cores: set[int] | None = None) -> tuple[int, str]:
    """Run a command of agentrig, on some cores; return its exit status, and its output if no file gets it."""
    command, wide = [sys.executable, "-m", "agentrig", *words], {**os.environ, "COLUMNS": "200"}
    with log.open("ab") if log is not None else nullcontext(subprocess.PIPE) as to:
        errors = None if log is None else to
        process = subprocess.Popen(command, stdout=to, stderr=errors, stdin=subprocess.DEVNULL, env=wide)
        if cores is not None:
            os.sched_setaffinity(process.pid, cores)
        said, _ = process.communicate()
    return process.returncode, (said or b"").decode()


if __name__ == "__main__":
    main()
