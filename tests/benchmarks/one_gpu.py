"""How long a step of `grpo` takes on one GPU, with each server: verl_step.py's model, prompts, lengths and n.

    python tests/benchmarks/one_gpu.py [--server vllm|embedded] [--shape 18m|135m|0.5b|1.5b|3b|7b] [--rows 32x4x816+128]
        [--steps 8] [--without-checkpoints] [KEY=VALUE …]

The run has the default settings, its checkpoints among them (`algorithm.save_every = "auto"`). Compare the mean step
with that of `--without-checkpoints`, which saves once at the end. Prints the parts of each step, their medians over all
steps after the first two, what the checkpoints cost, and how long the first step took to end after the command, with
the parts of the start that the server's log names. On CUDA also the memory of the card that was in use, by
`nvidia-smi`: at the end of each step and at most during it, and at most during the run. Nothing else may use the card
meanwhile, and the script fails if it is more than `hardware.memory_gib`. `peak_first_gib` is the most during steps 2
to 6 (step 1 has the server's start), `peak_last_gib` that of the last five steps, from step 2 on: a run of 12 steps or
more whose memory grows has more in the second. With `--server vllm`, run it twice: the first run writes vLLM's caches.
With adapters whose frozen weights are on the card once (`algorithm.lora_rank=16 algorithm.lora_base=server`; by itself
where both copies don't fit, as with `--shape 7b hardware.memory_gib=24`) `plan` says "which the learner reads". Then
`proofs` must have `arrived` = `proofs`, `difference` < `bound`, and `tensors` of both the weights and the adapters.
On a CPU: --shape 18m --server embedded --hardware cpu --rows 2x4x64+16.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from agentrig.figures import unaudited_s

sys.path.insert(0, str(Path(__file__).parent))
import audited
import verl_step

PARTS = ("rollout", "reward", "update", "push", "delivery", "validation", "checkpoint", "audit")
STARTED = re.compile(r"agentrig: serving, seconds: (.*)")


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="vllm")
    parser.add_argument("--hardware", default="cuda")
    parser.add_argument("--shape", choices=tuple(verl_step.SHAPES), default="1.5b")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rows", default="", help="tasks x n x prompt + response tokens of a step")
    parser.add_argument("--without-checkpoints", action="store_true", help="save at the run's end only")
    parser.add_argument("--timeout", type=float, default=420.0, help="longest wait for the run, seconds")
    options, keys = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that nothing is left behind
    with tempfile.TemporaryDirectory(prefix="agentrig-one-gpu-", ignore_cleanup_errors=True) as folder:
        measure(Path(folder), options, keys)


def measure(folder: Path, options: argparse.Namespace, keys: list[str]) -> None:
    """Make the model, train, and print the figures."""
    tasks, n, prompt, answer = verl_step.parsed(options.rows or verl_step.ROWS[options.shape])
    context = prompt + answer + 64
    make = get_context("spawn").Process(  # a process of its own: its context would be counted on the card
        target=verl_step.make_model, args=(options.shape, folder / "model"), kwargs={"context": context}
    )
    make.start()
    make.join()
    verl_step.make_prompts(folder / "prompts.json", prompt)
    plugin = folder / "bench_plugin.py"
    plugin.write_text(f"PROMPTS = {str(folder / 'prompts.json')!r}\n" + verl_step.PLUGIN, "utf-8")
    words = [
        "--plugin", str(plugin), "--tasks", "bench-prompts", "--agent", "bench-call", "--reward", "bench-hash",
        "--adapter", "agent-match", "--algorithm", "grpo", "--hardware", options.hardware, "--server", options.server,
        "adapter.match=write_query", f"algorithm.model={folder / 'model'}", f"algorithm.steps={options.steps}",
        f"algorithm.tasks_per_step={tasks}", f"algorithm.group_size={n}", f"algorithm.max_tokens={answer}",
        f"algorithm.max_length={context}", "algorithm.lr=1e-6", "algorithm.validate_every=0",
        "algorithm.ppo_epochs=1", "algorithm.mini_batches=1",  # the recipe `mini` has two of each
        "run.report_tasks=2", "run.seed=0", "runners.n=4", "runners.threads=32",
        f"run.directory={folder}", "run.name=run", *keys,
    ]  # fmt: skip
    if options.without_checkpoints:
        words.append("algorithm.save_every=1000")
    log = folder / "log.txt"
    begun = time.perf_counter()
    first = None
    ends: list[int] = []  # how often the card's memory had been read when each step ended
    marks: dict[str, float] = {}
    server_log = folder / "run" / "server.log"
    with peak_of_the_card(options.hardware) as peak, running(words, log) as run:
        while run.poll() is None:
            if "server started" not in marks and server_log.is_file():
                marks["server started"] = time.perf_counter() - begun
            if "server answers" not in marks and server_log.is_file() and STARTED.search(read(server_log)):
                marks["server answers"] = time.perf_counter() - begun
            lines = lines_of(folder / "run")
            for line in lines[len(ends) :]:
                first = first or time.perf_counter() - begun
                ends.append(len(peak))
                say(line, time.perf_counter() - begun, peak[ends[-2] if len(ends) > 1 else 0 : ends[-1]])
            if time.perf_counter() - begun > options.timeout:
                run.kill()
            time.sleep(0.1)
    wall = time.perf_counter() - begun
    served = read(server_log) if server_log.is_file() else ""
    if run.returncode != 0 or len(lines_of(folder / "run")) < options.steps:
        print(log.read_text("utf-8", errors="replace")[-5000:], served[-8000:], sep="\n", flush=True)
        raise SystemExit(f"the run ended with status {run.returncode}")
    lines = lines_of(folder / "run")
    late = lines[2:] or lines
    summary = json.loads((folder / "run" / "summary.json").read_text("utf-8"))
    medians = {part: statistics.median(line["time_s"].get(part, 0.0) for line in late) for part in PARTS}
    figures = {
        "server": options.server,
        "shape": options.shape,
        "keys": keys,
        "step_s": statistics.median(unaudited_s(line) or 0.0 for line in late),
        "mean_step_s": statistics.mean(unaudited_s(line) or 0.0 for line in lines[1:] or lines),
        "checkpoints": checkpoints_of(lines, summary),
        **medians,
        "first_step_ended_after_s": first,
        "of_that_the_step": lines[0]["step_s"],
        "seconds_after_the_command": {name: round(at, 1) for name, at in marks.items()},
        "start_of_the_server": match[1] if (match := STARTED.search(served)) else None,
        "failures": summary["failures"],
        "warnings": [line["text"] for line in lines_of(folder / "run", "log.jsonl")],
        "prompt_tokens": lines[-1]["prompt_tokens"],
        "response_tokens": lines[-1]["response_tokens"],
        "peak_gib": max(peak) / 1024 if peak else None,
        **first_and_last(peak, ends),
        "plan": re.findall(r"memory: .*", read(log)),
        "proofs": summary.get("delivery"),
        "wall_s": wall,
        "audit": audited.figures(folder / "run"),
        "algorithm": {k: v for k, v in lines[-1]["algorithm"].items() if "token" in k or "ratio" in k or "differ" in k},
    }
    print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in figures.items()}, indent=1), flush=True)
    limit = next((float(key.split("=")[1]) for key in keys if key.startswith("hardware.memory_gib=")), 0.0)
    if limit and peak and max(peak) > limit * 1024:
        raise SystemExit(f"the run used {max(peak) / 1024:.2f} GiB of the card, more than its limit of {limit:g}")
    if summary["failures"]:
        raise SystemExit(f"rollouts failed, so the run did less than its peers: {summary['failures']}")


@contextmanager
def running(words: list[str], log: Path, environ: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Start the run; at the end nothing of it is left, also when it was killed."""
    with log.open("wb") as out:
        command = [sys.executable, "-m", "agentrig", "train", *words]
        run = subprocess.Popen(command, stdout=out, stderr=out, env=environ, start_new_session=True)
    try:
        yield run
    except SystemExit:  # stopped: what it had chosen and warned of is in no summary
        print(log.read_text("utf-8", errors="replace")[-5000:], flush=True)
        raise
    finally:
        run.kill()
        run.wait()
        for process in processes_naming(words[1]):
            os.kill(process, signal.SIGKILL)


def processes_naming(word: str) -> list[int]:
    """Return the processes whose command or environment has this word: servers and runners of the run."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                said = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
            except OSError:
                continue
            if str(Path(word).parent).encode() in said:
                found.append(int(folder.name))
    return found


@contextmanager
def peak_of_the_card(hardware: str) -> Iterator[list[int]]:
    """Yield a list that gets the MiB of the first card that are in use, four times a second; empty without CUDA."""
    used: list[int] = []
    if hardware != "cuda":
        yield used
        return
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={card}"]
    until = time.monotonic() + 20  # the process that made the model has ended, and the card gives its memory back
    while int(subprocess.run(query, capture_output=True, text=True, check=True).stdout) > 1024:
        if time.monotonic() > until:
            raise SystemExit(f"card {card} is in use by another process")
        time.sleep(0.25)
    with subprocess.Popen([*query, "--loop-ms=250"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = process.stdout
        reader = threading.Thread(target=lambda: used.extend(map(int, lines)))
        reader.start()
        try:
            yield used
        finally:
            process.terminate()
            reader.join()
            print(f"most of the card in use: {max(used, default=0) / 1024:.2f} GiB", file=sys.stderr, flush=True)


def first_and_last(used: list[int], ends: list[int]) -> dict[str, float | None]:
    """Return the most memory of the card, GiB, during steps 2 to 6, and during the last five from step 2 on.

    Args:
        used: What was in use at each reading, MiB.
        ends: How many readings there were when each step ended.
    """
    pairs = list(pairwise(ends))
    sides = {"peak_first_gib": pairs[:5], "peak_last_gib": pairs[-5:]}
    most = {name: max(used[side[0][0] : side[-1][1]], default=0) if side else 0 for name, side in sides.items()}
    return {name: size / 1024 or None for name, size in most.items()}


def checkpoints_of(lines: list[dict[str, Any]], summary: dict[str, object]) -> dict[str, object]:
    """Return what the checkpoints cost.

    `waited_s` has the seconds that each step waited for the one before it, in its `step_s`; the last checkpoint is
    written after the last step. `write_s` is the mean time that a write took in the background.
    """
    saved = summary["checkpoints"]
    assert isinstance(saved, dict)
    waited = {line["step"]: round(line["time_s"]["checkpoint"], 3) for line in lines if "checkpoint" in line["time_s"]}
    write_s = round(saved["seconds"] / max(saved["written"], 1), 2)
    return {"written": saved["written"], "bytes": saved["bytes"], "write_s": write_s, "waited_s": waited}


def read(file: Path) -> str:
    """Return a log's text."""
    return file.read_text("utf-8", errors="replace")


def lines_of(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Return the lines of a file of a run."""
    file = run / name
    text = file.read_text("utf-8") if file.is_file() else ""
    return [json.loads(line) for line in text.split("\n") if line.endswith("}")]


def say(line: dict[str, object], at: float, used: list[int]) -> None:
    """Print a step's parts, and what was in use of the card at its end and at most."""
    times = line["time_s"]
    assert isinstance(times, dict)
    parts = " ".join(f"{part} {times[part]:.2f}" for part in PARTS if part in times)
    card = f", card {used[-1] / 1024:.2f} GiB, at most {max(used) / 1024:.2f}" if used else ""
    print(f"step {line['step']} at {at:.1f} s: {line['step_s']:.2f} s, {parts}{card}", flush=True)


if __name__ == "__main__":
    main()
