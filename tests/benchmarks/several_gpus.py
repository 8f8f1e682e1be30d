"""What verl with shared tokens gains from several GPUs of one host, beside verl's own engine.

    python tests/benchmarks/several_gpus.py [--gpus 1,2,4,8] [--shapes 1.5b,7b] [--rows 32x4x816+128,16x8x4000+200]
        [--parts engines,steps,faults] [--budget 1500] [--work DIR] [--json FILE]

Three parts, in this order:

- `engines`: log-probabilities and update of both engines under FSDP, without Ray (verl_engine.py);
- `steps`: whole runs on Ray with a vLLM server on each GPU (verl_step.py), with this project's engine and with verl's;
- `faults`: a killed server, a killed rank and a killed run (test_verl_gpu.py).

Counts above the host's GPUs are left out and named. Nothing is started that cannot end within `--budget` seconds; what
was left out is named too. Prints a line for each result, and at the end the tables: seconds, tokens a second a GPU, and
the speed-up beside one GPU. The goal is 1.8 with two GPUs, and 6 with eight. Without a GPU: `--shapes 18m --rows
4x4x64+16 --gpus 1,2 --parts engines` runs on the CPU with Gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TOKENS = {"18m": 49152, "0.5b": 49152, "1.5b": 49152, "7b": 16384}
"""Tokens of a pass of the engine with shared tokens: activations and gathered weights must fit beside the optimizer."""


class Bench:
    """Runs commands within a budget of time, and collects their lines of JSON."""

    def __init__(self, budget_s: float, work: Path) -> None:
        self.ends = time.monotonic() + budget_s
        self.work = work
        self.found: list[dict[str, Any]] = []
        self.left_out: list[str] = []

    def run(self, name: str, command: list[str], *, most_s: float, **about: Any) -> None:
        """Run a command for at most `most_s` seconds, and keep the JSON lines with `about` added."""
        left = self.ends - time.monotonic()
        if left < min(most_s, 60):
            self.left_out.append(f"{name}: {left:.0f} s were left")
            return
        print(f"== {name}: {' '.join(command)}", flush=True)
        begun = time.monotonic()
        log = self.work / f"{name.replace(' ', '-')}.log"
        try:
            with log.open("w") as errors:
                ended = subprocess.run(
                    [sys.executable, *command], stdout=subprocess.PIPE, stderr=errors, text=True,
                    timeout=min(most_s, left), env={**os.environ, "PYTHONUNBUFFERED": "1"},
                )  # fmt: skip
            output, status = ended.stdout, ended.returncode
        except subprocess.TimeoutExpired as error:
            output, status = (error.stdout or b"").decode(errors="replace"), "none: it took too long"
        for line in output.splitlines():
            if line.startswith("{"):
                print(line, flush=True)
                self.found.append({**about, **json.loads(line)})
            elif "passed" in line or "failed" in line:
                print(line, flush=True)
        print(f"== {name}: status {status} after {time.monotonic() - begun:.0f} s", flush=True)
        if status != 0:
            print(output[-1500:], log.read_text("utf-8", errors="replace")[-3000:], sep="\n", flush=True)
            self.left_out.append(f"{name}: status {status}")


def gpus_here() -> int:
    """Return how many GPUs the host has; a host without any stands for as many as it has cores."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else len(os.sched_getaffinity(0))


def engines(bench: Bench, shape: str, gpus: int, rows: list[str]) -> None:
    """Measure both engines on one number of GPUs."""
    command = [str(HERE / "verl_engine.py"), "--shape", shape, "--gpus", str(gpus), "--rows", *rows]
    command += ["--engines", "forest,verl", "--tokens", str(TOKENS[shape]), "--repeat", "2"]
    command += ["--work", str(bench.work / shape)]
    bench.run(f"engines {shape} {gpus}", command, most_s=420, part="engines", shape=shape)


def steps(bench: Bench, shape: str, gpus: int, rows: str, engine: str) -> None:
    """Measure the steps of a whole run."""
    command = [str(HERE / "verl_step.py"), "agentrig", "--shape", shape, "--gpus", str(gpus), "--rows", rows]
    command += ["--engine", engine, "--tokens", str(TOKENS[shape]), "--steps", "6"]
    command += ["--work", str(bench.work / f"step-{shape}-{rows}")]
    bench.run(f"step {shape} {gpus} {rows} {engine}", command, most_s=600, part="steps", rows=rows, engine=engine)


def table(found: list[dict[str, Any]]) -> str:
    """Return the results as Markdown, each beside one GPU."""
    lines = ["| what | engine | shape | rows | GPUs | seconds | tokens/s/GPU | beside one GPU |", "| --- " * 8 + "|"]
    alone: dict[tuple[str, ...], float] = {}
    for one in found:
        if "update_s" in one:
            timed = {"update": one["update_s"], "log-probs": one["log_probs_s"]}
            tokens = one["tokens"]
        elif "timing_s/step" in one:
            timed = {name.removeprefix("timing_s/"): one[name] for name in one if name.startswith("timing_s/")}
            tokens = one["perf/total_num_tokens"]
        else:
            continue
        for name, seconds in timed.items():
            key = (one["part"], name, one["engine"], one["shape"], one["rows"])
            if one["gpus"] == 1:
                alone[key] = seconds
            ratio = f"{alone[key] / seconds:.2f}" if key in alone and seconds else ""
            rate = f"{tokens / seconds / one['gpus']:.0f}" if seconds else ""
            what = f"{one['part']}: {name}"
            lines.append(
                f"| {what} | {one['engine']} | {one['shape']} | {one['rows']} | {one['gpus']} | {seconds:.3f} | {rate} "
                f"| {ratio} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Run all parts and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="1,2,4,8")
    parser.add_argument("--shapes", default="1.5b,7b")
    parser.add_argument("--rows", default="32x4x816+128,16x8x4000+200")
    parser.add_argument("--parts", default="engines,steps,faults")
    parser.add_argument("--budget", type=float, default=1500.0, help="seconds for everything")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--json", type=Path, help="where all results go")
    arguments = parser.parse_args()
    work = (arguments.work or Path(tempfile.mkdtemp(prefix="several-gpus-"))).resolve()
    work.mkdir(parents=True, exist_ok=True)
    bench = Bench(arguments.budget, work)
    rows, parts, here = arguments.rows.split(","), arguments.parts.split(","), gpus_here()
    counts = [int(count) for count in arguments.gpus.split(",")]
    bench.left_out += [f"{count} GPUs: the host has {here}" for count in counts if count > here]
    counts = [count for count in counts if count <= here]
    for shape in arguments.shapes.split(","):
        for count in counts if "engines" in parts else ():
            engines(bench, shape, count, rows)
    for shape in arguments.shapes.split(","):
        for engine in ("forest", "verl") if "steps" in parts else ():
            for length in rows:
                for count in counts:
                    steps(bench, shape, count, length, engine)
    if "faults" in parts:
        bench.run("faults", ["-m", "pytest", "-q", "-m", "gpu", "plugins/agentrig-verl/tests/test_verl_gpu.py"],
                  most_s=600)  # fmt: skip
    if arguments.json:
        arguments.json.write_text(json.dumps(bench.found, indent=1), "utf-8")
    print(table(bench.found), flush=True)
    for line in bench.left_out:
        print(f"not run: {line}", flush=True)


if __name__ == "__main__":
    main()
