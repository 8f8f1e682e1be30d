"""Healthy runs of unlike kinds: the auditor must say nothing of any, and by how far.

    python tests/benchmarks/audited.py [--only WORD …] [--jobs 1] [--threads 2] [--limit 300] [--json FILE]

Trains each kind for a few steps on the CPU, `--jobs` at a time, and prints a line for each run: links that were looked
at, why others were not, the largest ratio of difference to bound by link, what the audits took beside what the steps
took, and every fault. The exit status is 1 if a run has a fault or did not end well. The kinds on a GPU are runs of
one_gpu.py and verl_step.py, which print the same figures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from agentrig.figures import unaudited_s

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
HOOKS = ("register_tasks", "register_agents", "register_rewards", "register_recipes")
SMALL = ("algorithm.steps=4", "algorithm.tasks_per_step=16", "algorithm.validate_every=2", "run.report_tasks=32",
         "run.validation_tasks=16", "runners.n=1", "runners.threads=8")  # fmt: skip
LORA = ("algorithm.lora_rank=8",)
BF16 = ("algorithm.dtype=bfloat16",)
KINDS: dict[str, tuple[str, ...]] = {
    "mini, seed 0": ("run.seed=0",),
    "mini, seed 1": ("run.seed=1",),
    "mini, seed 2": ("run.seed=2",),
    "mini, lr 1e-3": ("algorithm.lr=1e-3",),
    "mini, lr 1e-5": ("algorithm.lr=1e-5",),
    "mini, lr 1e-7": ("algorithm.lr=1e-7",),
    "mini, one update": ("algorithm.ppo_epochs=1", "algorithm.mini_batches=1"),
    "mini, eight updates": ("algorithm.ppo_epochs=2", "algorithm.mini_batches=4"),
    "mini, short passes": ("algorithm.tokens_per_batch=256",),
    "adapters": LORA,
    "adapters, seed 1": (*LORA, "run.seed=1", "algorithm.lr=1e-3"),
    "adapters and KL": (*LORA, "algorithm.kl_loss_coef=0.05"),
    "KL": ("algorithm.kl_loss_coef=0.05",),
    "KL, one update": ("algorithm.kl_loss_coef=0.1", "algorithm.ppo_epochs=1", "algorithm.mini_batches=1"),
    "stale": ("algorithm.max_staleness=1",),
    "stale, adapters": (*LORA, "algorithm.max_staleness=1"),
    "by rollout, scaled": ("algorithm.loss_agg_mode=seq-mean-token-mean", "credit.use=grpo"),
    "negative scale": ("credit.negative_scale=0.5",),
    "a nucleus": ("algorithm.top_p=0.9", "algorithm.temperature=0.8"),
    "hot": ("algorithm.temperature=1.4",),
    "linear schedule, decay": (
        "algorithm.lr_scheduler_type=linear", "algorithm.warmup_steps=2", "algorithm.weight_decay=0.1",
    ),
    "gradient checkpointing": ("algorithm.gradient_checkpointing=true",),
    "bf16": BF16,
    "bf16, seed 1": (*BF16, "run.seed=1"),
    "bf16, adapters": (*BF16, *LORA),
    "bf16, KL": (*BF16, "algorithm.kl_loss_coef=0.05"),
    "groups of 16": ("algorithm.group_size=16", "algorithm.tasks_per_step=6"),
    "three turns": ("agent.max_turns=3",),
    "rows in the prompt": ("agent.sample_rows=2", "algorithm.max_tokens=32"),
    "every query is taught": ("adapter.match=",),
    "resumed": ("resumed",),
    "8-bit AdamW": ("algorithm.optimizer=adamw8bit",),
    "8-bit AdamW, adapters": (*LORA, "algorithm.optimizer=adamw8bit"),
    "units": ("units",),
    "units, seed 1": ("units", "run.seed=1"),
    "units, seed 2": ("units", "run.seed=2"),
    "json-repair": ("json-repair",),
    "json-repair, seed 1": ("json-repair", "run.seed=1"),
    "json-repair, seed 2": ("json-repair", "run.seed=2"),
    "programs": ("programs",),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=float, default=300.0, help="longest wait for a command, seconds")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kinds = {name: keys for name, keys in KINDS.items() if not options.only or any(w in name for w in options.only)}
    with tempfile.TemporaryDirectory(prefix="agentrig-audited-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        jobs = [pool.submit(audited, Path(folder), name, keys, options) for name, keys in kinds.items()]
        found = [job.result() for job in jobs]
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), "utf-8")
    wrong = [each["kind"] for each in found if each["faults"] or each["status"]]
    print(json.dumps({"runs": len(found), "wrong": wrong, "largest": max(e["largest"] for e in found)}), flush=True)
    raise SystemExit(bool(wrong))


def audited(folder: Path, name: str, keys: tuple[str, ...], options: argparse.Namespace) -> dict[str, Any]:
    """Train one kind, and return what the auditor said."""
    run = folder / "".join(c if c.isalnum() else "-" for c in name)
    threads = (f"hardware.threads={options.threads}", "--hardware", "cpu")
    words = ["train", "mini", *threads, *SMALL, *keys, f"run.directory={folder}", f"run.name={run.name}"]
    commands, env = [words], dict(os.environ)
    if keys == ("resumed",):
        words.remove("resumed")
        commands = [[*words, "algorithm.steps=2"], ["train", "--resume", str(run), "algorithm.steps=4"]]
    elif keys[0] in ("units", "json-repair"):
        package, *more = keys
        module, model = f"agentrig_{package.replace('-', '_')}", folder / f"{run.name}-start"
        env["PYTHONPATH"] = os.pathsep.join([str(EXAMPLES / f"agentrig-{package}" / "src"), env.get("PYTHONPATH", "")])
        plugin = folder / f"{run.name}.py"  # the package is not installed
        plugin.write_text(f"from {module} import *\nfrom {module} import {', '.join(HOOKS)}\n", "utf-8")
        own = [package, "--plugin", str(plugin)]
        words = ["train", *own, *threads, *SMALL, *more, f"algorithm.model={model}", f"run.directory={folder}",
                 f"run.name={run.name}"]  # fmt: skip
        commands = [["warmup", *own, "--out", str(model), "--minutes", "1.5"], words]
    elif keys == ("programs",):
        model, own = folder / "dice", str(EXAMPLES / "programs" / "bash.toml")
        words = ["train", own, *threads, *SMALL, f"algorithm.model={model}", f"agent.folder={EXAMPLES / 'programs'}",
                 f"run.directory={folder}", f"run.name={run.name}"]  # fmt: skip
        subprocess.run([sys.executable, str(EXAMPLES / "programs" / "start.py"), str(model)], check=True, env=env)
        commands = [words]
    begun, status, log = time.monotonic(), 0, folder / f"{run.name}.log"
    with log.open("ab") as out:
        for command in commands:
            try:
                status = subprocess.run(
                    [sys.executable, "-m", "agentrig", *command], stdout=out, stderr=out, env=env, cwd=folder,
                    timeout=options.limit,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                status = -1
    found = figures(run) | {"kind": name, "status": status, "wall_s": round(time.monotonic() - begun, 1)}
    print(json.dumps(found), flush=True)
    if status or found["faults"]:
        print(log.read_text("utf-8", errors="replace")[-3000:], flush=True)
    return found


def figures(run: Path) -> dict[str, Any]:
    ratios: dict[str, float] = {}
    faults, unseen, seconds = [], {}, {}
    for file in sorted((run / "audit").glob("verdicts-*.json")):
        told = json.loads(file.read_text("utf-8"))
        seconds[told["step"]] = round(told["seconds"], 2)
        for each in told["verdicts"]:
            ratios[each["link"]] = max(ratios.get(each["link"], 0.0), each["ratio"])
            if each["result"] == "fault":
                faults.append(f"{each['link']}: {each['detail']}")
            elif each["result"] != "ok":
                unseen[each["link"]] = each["detail"]
    metrics = run / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text("utf-8").splitlines()] if metrics.is_file() else []
    return {
        "steps": [round(unaudited_s(line) or 0.0, 2) for line in lines],
        "audit_s": seconds,
        "ratios": {link: round(ratio, 4) for link, ratio in ratios.items() if ratio},
        "largest": max(ratios.values(), default=0.0),
        "not looked at": unseen,
        "faults": faults,
    }


if __name__ == "__main__":
    main()
