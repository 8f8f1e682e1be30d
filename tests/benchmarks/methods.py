"""One agent and one reward, improved by each method: the runs of the table in methods.md, and that table.

    python tests/benchmarks/methods.py --model DIR [--seeds 0,1,2] [--at-once 1] [--out runs] [--file FILE] [--turns]
    python tests/benchmarks/methods.py --recipe units [--model DIR] …

DIR is a model from before the labels. For `mini`, `make_mini.py --out DIR/.. --labelled 0` writes it as `stage-1`
(plugins/agentrig-grpo/training). For `units`, `agentrig warmup` makes it first, as `start` in the folder of `--out`:
from random weights, with 300 of the 600 labels that `sft` gets, until it is right in 15% of its samples.

`--turns` makes the runs of credit by turn instead, from the shipped model of `mini`. Each run has two cores of its own,
so `--at-once` is at most half of the cores. A run of an earlier call is kept if it is complete, and goes on from its
last checkpoint if it is not. Words such as `algorithm.steps=10` at the end are for every run.

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


@attrs.frozen
class Job:
    """A run to make.

    Attributes:
        words: Of its `agentrig train`.
        after: The name of the run that it starts from.
        warmup: Words of the `agentrig warmup` that makes its model, if `model` is not there yet.
        model: The directory of that model.
    """

    words: Sequence[str]
    after: str = ""
    warmup: Sequence[str] = ()
    model: Path = Path()


def arguments(about: str | None, out: str) -> argparse.ArgumentParser:
    """Return the arguments of a script that makes runs and their table."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="section.key=value of every run")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--hour", type=float, default=0.1, help="price of an hour of two cores, USD; %(default)s")
    parser.add_argument("--file", type=Path, help="a text file for what is printed; as JSON in FILE.json")
    return parser


def parsed(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, Callable[[str], None]]:
    """Return the arguments, and a function that prints a text, and writes it to the file if there is one."""
    options, lines = parser.parse_args(), list[str]()
    most = max(1, len(os.sched_getaffinity(0)) // 2)
    if not 1 <= options.at_once <= most:
        parser.error(f"--at-once is from 1 to {most}, for each run has two cores")
    for folder in (options.out, options.file.parent if options.file is not None else options.out):
        folder.mkdir(parents=True, exist_ok=True)

    def say(text: str) -> None:
        print(text, flush=True)
        lines.append(text)
        if options.file is not None:
            options.file.write_text("\n".join(lines) + "\n", "utf-8")

    return options, say


def main() -> None:
    parser = arguments(__doc__, "runs")
    parser.add_argument("--recipe", choices=list(RECIPES), default="mini")
    parser.add_argument("--model", type=Path, help="the directory of the first model")
    parser.add_argument("--turns", action="store_true")
    options, say = parsed(parser)
    recipe, start = RECIPES[options.recipe], options.model
    if options.turns and options.recipe != "mini":
        parser.error("--turns is for mini")
    if start is None and not options.turns and not recipe.warmup:
        parser.error("name the first model: --model DIR")
    if start is not None and not (start / "config.json").is_file():
        parser.error(f"{start} is not the directory of a model: it has no config.json")
    where = [options.recipe]
    if recipe.source is not None and importlib.util.find_spec(f"agentrig_{options.recipe}") is None:
        where += ["--plugin", str(recipe.source / f"agentrig_{options.recipe}" / "__init__.py")]
        os.environ["PYTHONPATH"] = os.pathsep.join([str(recipe.source), *filter(None, [os.environ.get("PYTHONPATH")])])
    if start is None and not options.turns:
        start = options.out / "start"
        if not start.is_dir():
            status, said = output(["warmup", *where, *recipe.warmup, "--out", str(start)])
            say(said)
            if status:
                sys.exit(status)
    jobs: dict[str, Job] = {}
    for seed in options.seeds.split(","):
        first = [] if options.turns else [f"algorithm.model={start.resolve()}"]
        for name, words in (TURNS if options.turns else METHODS).items():
            more = recipe.sft if name == "sft" else ()
            jobs[f"{name}-{seed}"] = Job([*where, *words, *more, *first, f"run.seed={seed}", *options.words])
        for name, before in {} if options.turns else AFTER.items():
            from_run = ["--start", str(options.out / f"{before}-{seed}")]
            words = [*where, *from_run, f"run.seed={seed}", *options.words]
            jobs[f"{name}-{seed}"] = Job(words, after=f"{before}-{seed}")
    make(jobs, options, say)


def make(jobs: Mapping[str, Job], options: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Make the runs and their table, of those too that did not end well; exit with an error if there are such.

    A run that does not begin with the common start is compared with its own, in a table of its own.
    """
    cores = sorted(os.sched_getaffinity(0))
    failed = run_all(
        jobs, options.out, [set(cores[2 * place : 2 * place + 2]) for place in range(options.at_once)], say
    )
    begun = [str(options.out / name) for name in jobs if (options.out / name / "manifest.json").is_file()]
    prices = options.out / "prices.toml"
    status, said = output(["compare", "--json", *begun]) if begun else (1, "")
    if not status:
        rows = json.loads(said)["runs"]
        machines = sorted({row["machine"] for row in rows})
        other = [row["against_start"]["reason"] == "other-start" for row in rows]
        apart = [run for run, begins_apart in zip(begun, other, strict=True) if begins_apart]
        priced = [f"\n[machines.{json.dumps(machine)}]\nhour = {options.hour}\n" for machine in machines]
        prices.write_text("".join(['currency = "USD"\n', *priced]), "utf-8")
        for more in ([], ["--each"]):
            status, said = output(["compare", "--prices", str(prices), *more, *begun])
            say(said)
        for run in apart:
            say(output(["compare", "--prices", str(prices), run])[1])
    if options.file is not None and not status:
        status, said = output(["compare", "--prices", str(prices), "--json", *begun])
        Path(f"{options.file}.json").write_text(said, "utf-8")
    if failed:
        sys.exit(f"these runs did not end well: {', '.join(failed)}; see their logs in {options.out}")
    sys.exit(status)


def run_all(jobs: Mapping[str, Job], out: Path, cores: Sequence[set[int]], say: Callable[[str], None]) -> list[str]:
    """Run the jobs, one at a time on each set of cores, each after the run that it starts from.

    Returns:
        The names of those that failed.
    """
    waiting = dict(jobs)
    ended: dict[str, int] = {}
    lock = threading.Lock()

    def work(mine: set[int]) -> None:
        while True:
            with lock:
                name = next((name for name, job in waiting.items() if not job.after or job.after in ended), None)
                job = waiting.pop(name) if name is not None else None
            if name is None or job is None:
                if not waiting:
                    return
                time.sleep(1)
                continue
            begun, status, summary, log = time.monotonic(), 0, out / name / "summary.json", out / f"{name}.log"
            warmed = ""
            if job.warmup and not job.model.is_dir():
                status = agentrig(["warmup", *job.warmup, "--out", str(job.model)], log, mine)
                warmed, begun = f"warm-up {time.monotonic() - begun:.0f} s, ", time.monotonic()
            if not status and not (summary.is_file() and json.loads(summary.read_bytes()).get("complete")):
                command = ["train", *job.words, f"run.directory={out}", f"run.name={name}", "--hardware", "cpu"]
                command += ["hardware.threads=2"]
                if (out / name / "config.toml").is_file():
                    command = ["train", "--resume", str(out / name)]
                status = agentrig(command, log, mine)
            with lock:
                ended[name] = status
                say(f"{name}: exit status {status}, {warmed}{time.monotonic() - begun:.0f} s")

    threads = [threading.Thread(target=work, args=(mine,)) for mine in cores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [name for name in jobs if ended.get(name, 1)]


def agentrig(words: Sequence[str], log: Path, cores: set[int]) -> int:
    """Run a command of agentrig on some cores, its output in a file; return its exit status."""
    command = [sys.executable, "-m", "agentrig", *words]
    with log.open("ab") as to:
        process = subprocess.Popen(command, stdout=to, stderr=to, stdin=subprocess.DEVNULL)
        os.sched_setaffinity(process.pid, cores)
        return process.wait()


def output(words: Sequence[str]) -> tuple[int, str]:
    """Return the exit status of a command of agentrig, and what it prints in 200 columns."""
    command, wide = [sys.executable, "-m", "agentrig", *words], {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=wide, check=False)
    return done.returncode, done.stdout


if __name__ == "__main__":
    main()
