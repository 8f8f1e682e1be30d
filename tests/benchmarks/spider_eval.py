"""All of real Spider dev through the LangGraph agent, with a model server that replays known answers.

    python tests/benchmarks/spider_eval.py [--limit N]

Of the answers every third is another question's gold query on the same database, the rest the question's own gold.
`agentrig eval` must find the accuracy that the reward gives to the same answers when it is called directly.
Spider is read from AGENTRIG_SPIDER_DIR.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from replay_llm import replay_server


def known_answers(tasks: Any) -> dict[str, str]:
    """Return an answer for every question: two thirds gold, one third a neighbour's gold."""
    answers = {}
    for i, task in enumerate(tasks):
        source = task
        if i % 3 == 2:
            others = [t for t in tasks if t.input["db_id"] == task.input["db_id"]]
            source = others[(others.index(task) + 7) % len(others)]
        answers[f"{task.input['db_id']}\t{task.input['question'].strip()}"] = source.private["gold"]
    return answers


def compare(limit: int, folder: Path, *words: str) -> dict[str, Any]:
    """Return both accuracies and the figures of `agentrig eval`."""
    from agentrig.agents import Outcome
    from agentrig.plugins.loading import load
    from agentrig.runners.scorer import Scorer

    registry = load()
    tasks_spec, reward_spec = registry.find("tasks", "spider").spec, registry.find("reward", "spider-exec").spec
    tasks = list(tasks_spec.build(tasks_spec.config()).load("dev"))
    tasks = tasks[:limit] if limit else tasks
    answers = known_answers(tasks)
    given = [answers[f"{t.input['db_id']}\t{t.input['question'].strip()}"] for t in tasks]
    start = time.perf_counter()
    scorer = Scorer(reward_spec.build(reward_spec.config()), budget_s=10)
    scores = scorer([(t, Outcome(answer=a)) for t, a in zip(tasks, given, strict=True)])
    direct_s = time.perf_counter() - start
    values = [s.value for s in scores if s.value is not None]
    with replay_server(answers, folder) as address:
        command = [sys.executable, "-m", "agentrig", "eval", *words, "--endpoint", address, "--split", "dev", "--json"]
        command += ["--limit", str(limit), "--save", str(folder / "predictions.jsonl")]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    predictions = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    return {
        **found,
        "direct_accuracy": sum(v >= 1 for v in values) / len(values),
        "direct_n": len(values),
        "direct_s": direct_s,
        "same_answers": sum(p["answer"].strip() == a.strip() for p, a in zip(predictions, given, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--limit", type=int, default=0)
    options = parser.parse_args()
    if "AGENTRIG_SPIDER_DIR" not in os.environ:
        raise SystemExit("set AGENTRIG_SPIDER_DIR to the folder of Spider's Parquet files")
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(compare(options.limit, Path(folder), "spider"), indent=2))


if __name__ == "__main__":
    main()
