"""How long a step of `grpo` takes on one GPU, with each server: verl_step.py's model, prompts, lengths and n.

    python tests/benchmarks/one_gpu.py [--server vllm|embedded] [--shape 18m|135m|0.5b|1.5b] [--rows 32x4x816+128]
        [--steps 8] [--without-checkpoints] [KEY=VALUE …]

The run has the default settings, its checkpoints among them (`algorithm.save_every = "auto"`). Compare the mean step
with that of `--without-checkpoints`, which saves once at the end. Prints the parts of each step, their medians over all
steps after the first two, what the checkpoints cost, and how long the first step took to end after the command, with
the parts of the start that the server's log names. With `--server vllm`, run it twice: the first run writes vLLM's
caches. On a CPU: --shape 18m --server embedded --hardware cpu --rows 2x4x64+16.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import audited
import verl_step

PARTS = ("rollout", "reward", "update", "push", "delivery", "validation", "checkpoint")
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
    with tempfile.TemporaryDirectory(prefix="agentrig-one-gpu-") as folder:
        measure(Path(folder), options, keys)


def measure(folder: Path, options: argparse.Namespace, keys: list[str]) -> None:
    """Make the model, train, and print the figures."""
    tasks, n, prompt, answer = verl_step.parsed(options.rows or verl_step.ROWS[options.shape])
    context = prompt + answer + 64
    verl_step.make_model(options.shape, folder / "model", context=context)
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
    with log.open("wb") as out:
        run = subprocess.Popen([sys.executable, "-m", "agentrig", "train", *words], stdout=out, stderr=out)
    first, seen = None, 0
    marks: dict[str, float] = {}
    server_log = folder / "run" / "server.log"
    try:
        while run.poll() is None:
            if "server started" not in marks and server_log.is_file():
                marks["server started"] = time.perf_counter() - begun
            if "server answers" not in marks and server_log.is_file() and STARTED.search(read(server_log)):
                marks["server answers"] = time.perf_counter() - begun
            lines = lines_of(folder / "run")
            for line in lines[seen:]:
                first = first or time.perf_counter() - begun
                say(line, time.perf_counter() - begun)
            seen = len(lines)
            if time.perf_counter() - begun > options.timeout:
                run.kill()
            time.sleep(0.1)
    finally:
        run.kill()
        run.wait()
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
        "step_s": statistics.median(line["step_s"] for line in late),
        "mean_step_s": statistics.mean(line["step_s"] for line in lines[1:] or lines),
        "checkpoints": checkpoints_of(lines, summary),
        **medians,
        "first_step_ended_after_s": first,
        "of_that_the_step": lines[0]["step_s"],
        "seconds_after_the_command": {name: round(at, 1) for name, at in marks.items()},
        "start_of_the_server": match[1] if (match := STARTED.search(served)) else None,
        "prompt_tokens": lines[-1]["prompt_tokens"],
        "response_tokens": lines[-1]["response_tokens"],
        "proofs": summary.get("delivery"),
        "wall_s": wall,
        "audit": audited.figures(folder / "run"),
        "algorithm": {k: v for k, v in lines[-1]["algorithm"].items() if "token" in k or "ratio" in k or "differ" in k},
    }
    print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in figures.items()}, indent=1), flush=True)


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


def lines_of(run: Path) -> list[dict[str, Any]]:
    """Return the lines of `metrics.jsonl`."""
    file = run / "metrics.jsonl"
    text = file.read_text("utf-8") if file.is_file() else ""
    return [json.loads(line) for line in text.split("\n") if line.endswith("}")]


def say(line: dict[str, object], at: float) -> None:
    """Print a step's parts."""
    times = line["time_s"]
    assert isinstance(times, dict)
    parts = " ".join(f"{part} {times[part]:.2f}" for part in PARTS if part in times)
    print(f"step {line['step']} at {at:.1f} s: {line['step_s']:.2f} s, {parts}", flush=True)


if __name__ == "__main__":
    main()
