"""The embedded algorithm trains a Llama of 33M random parameters on real Spider, is killed in step 2, and resumed.

    AGENTRIG_SPIDER_DIR=… python tests/benchmarks/embedded_spider.py

The agent is the LangGraph agent with the full prompts and the schemas of real databases. A random model never answers
right, so the reward is `letters` of `random_policy/plugin.py`, which differs from one random text to the next: this
shows that a run goes through and what it costs, not that anything is learned about SQL. Every step must be there once,
the weights must have changed, and the server's log-probabilities must be the learner's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "random_policy"))
import killed
import plugin
import start

STEPS, AFTER, CONTEXT = 3, 1, 4096


def schemas(count: int) -> list[str]:
    """Return the full prompt's schemas of so many training databases, to learn a tokenizer from."""
    from agentrig_langgraph_sql.prompts import PRESETS
    from agentrig_langgraph_sql.schema import schema_text
    from agentrig_spider.tasks.spider import Spider, SpiderConfig

    tasks = Spider(SpiderConfig()).load("train")
    databases = list(dict.fromkeys(task.input["database"] for task in tasks))[:count]
    questions = [task.input["question"] for task in tasks[::20]]
    return [schema_text(d, style=PRESETS["full"].schema_style, limit=2048) for d in databases] + questions


def measure(folder: Path, options: argparse.Namespace) -> dict[str, object]:
    """Train and return the figures; raises SystemExit where something is not as it must be."""
    model = folder / "model"
    parameters = start.make(model, family="llama", shape=options.shape, context=CONTEXT, texts=schemas(60))
    made = time.perf_counter()
    words = [
        "--plugin", str(Path(plugin.__file__)), "--tasks", "spider", "--agent", "langgraph-sql", "--reward", "letters",
        "--adapter", "agent-match", "--algorithm", "grpo", "--hardware", "cpu", "adapter.match=write",
        "agent.prompts=full", f"agent.max_turns={options.turns}", "run.report_tasks=2", "run.seed=0",
        f"algorithm.model={model}", f"algorithm.tasks_per_step={options.tasks}", "algorithm.group_size=4",
        f"algorithm.max_tokens={options.max_tokens}", "algorithm.lr=1e-4", "algorithm.validate_every=0",
        "algorithm.tokens_per_batch=4096", "runners.n=2", "runners.threads=8", "runners.deadline_s=600",
    ]  # fmt: skip
    run = killed.Run(folder)
    lines = killed.kill_and_resume(
        run, words, after=AFTER, steps=STEPS, pause_s=options.pause, timeout_s=options.timeout
    )
    print(killed.table(lines), flush=True)
    off = {line["step"]: line["algorithm"]["ratio_max"] for line in lines}
    if any(abs(ratio - 1) > 1e-3 for ratio in off.values()):
        raise SystemExit(f"the server's log-probabilities are not the learner's: greatest ratios {off}")
    latest = sorted((run.path / "checkpoints").glob(f"*{STEPS:05d}"))[-1]
    changed = start.weights_differ(model, latest)
    if not changed:
        raise SystemExit("the last checkpoint holds the weights of the start")
    summary = json.loads((run.path / "summary.json").read_text("utf-8"))
    return {
        "parameters": parameters,
        "tensors that changed": changed,
        "failures": summary["failures"],
        "rollouts": summary["rollouts"],
        "prompt tokens, mean of trained calls": round(summary["prompt_tokens"]),
        "median step, s": round(sorted(line["step_s"] for line in lines)[STEPS // 2], 1),
        "learner tokens/s": [round(line["algorithm"]["learner_tokens_per_s"]) for line in lines],
        "peak memory of all processes, MiB": run.peak >> 20,
        "training_s": round(time.perf_counter() - made, 1),
    }


def main() -> None:
    """Make the model, train, check and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(start.SHAPES), default="33m")
    parser.add_argument("--tasks", type=int, default=4, help="tasks of a step, each with 4 rollouts")
    parser.add_argument("--turns", type=int, default=2, help="the agent's agent.max_turns")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--pause", type=float, default=3.0, help="seconds into step 2 at which the run is killed")
    parser.add_argument("--timeout", type=float, default=1200.0, help="longest wait for each half of the run, seconds")
    options = parser.parse_args()
    if not {"AGENTRIG_SPIDER_DIR", "VERL_SPIDER_DATA_DIR"} & os.environ.keys():
        raise SystemExit("set AGENTRIG_SPIDER_DIR to the folder of Spider's Parquet files")
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="agentrig-random-") as folder:
        figures = measure(Path(folder), options)
    print(json.dumps({**figures, "wall_s": round(time.perf_counter() - begun, 1)}, indent=1))


if __name__ == "__main__":
    main()
