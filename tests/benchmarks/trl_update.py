"""Rollouts a second of the update alone: the learner of `grpo` and TRL's GRPOTrainer, on the same rows and model.

```
python3.11 -m venv TRL && TRL/bin/pip install --no-deps trl==1.16.0
echo "$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" > \\
    TRL/lib/python3.11/site-packages/libraries.pth
python tests/benchmarks/trl_update.py --trl TRL/bin/python
```

The rows are the trained calls of one step of `mini`, recorded by a run of one step, as many as four equal mini-batches
need; the model is the shipped one, in fp32. Both sides make two passes over them in two mini-batches each, so four
updates of AdamW, with the clipped loss as a mean over tokens, the recorded log-probabilities as those of the sampling
policy, clipped gradients, no KL, and entropy as a figure. `--rows gradient`, the default, takes only calls whose
advantage is not 0, so that leaving the others out gains nothing; `--rows all` takes every call.

TRL's side is `GRPOTrainer.train()` with generation and scoring replaced by the recorded tensors; the time inside that
replacement is taken off. `--batch` is its `per_device_train_batch_size`: the best of several counts. Both sides
run in processes of their own, in turns, each after one step that is not counted; the median of each side counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

LR, CLIP_LOW, CLIP_HIGH, NORM, EPOCHS, MINI_BATCHES = 2e-4, 0.2, 0.28, 1.0, 2, 2
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def recorded(folder: Path) -> list[dict[str, Any]]:
    """Run one step of `mini` and return its trained calls."""
    import attrs

    from agentrig.adapters import identified
    from agentrig.plan import resolve
    from agentrig.run.rows import stored_rollouts

    words = ["algorithm.steps=1", "algorithm.validate_every=0", "run.report_tasks=1", "run.validation_tasks=1"]
    command = [sys.executable, "-m", "agentrig", "train", "mini", f"run.directory={folder}", "run.name=run", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    plan = resolve("mini")
    adapter = plan.build("adapter")
    rollouts = [r for some in stored_rollouts(folder / "run" / "rollouts", size=100) for r in some if r.mode == "train"]
    adapted = [attrs.evolve(r, triplets=tuple(identified(adapter(r.trace), r.trace))) for r in rollouts]
    names = ("prompt_ids", "response_ids", "logprobs", "advantage", "rollout", "group")
    return [{name: getattr(s, name) for name in names} for s in plan.build("algorithm").samples(adapted)]


def ours(rows: list[dict[str, Any]], steps: int, clock: str) -> list[float]:
    """Return the seconds of each step's four updates by the learner of `grpo`."""
    from agentrig_grpo import checkpoint
    from agentrig_grpo.config import GrpoConfig
    from agentrig_grpo.learner import Learner, TrainSample
    from agentrig_grpo.naming import model_directory

    samples = [TrainSample(**row) for row in rows]
    model = checkpoint.load_model(model_directory("mini"), device="cpu", attention="sdpa")
    config = GrpoConfig(
        lr=LR, clip_low=CLIP_LOW, clip_high=CLIP_HIGH, max_grad_norm=NORM, ppo_epochs=EPOCHS, mini_batches=MINI_BATCHES
    )
    learner = Learner(model, config, dtype="float32", seed=0)
    seconds = []
    for step in range(1, steps + 2):
        start = CLOCKS[clock]()
        metrics = learner.update(samples, step=step)
        seconds.append(CLOCKS[clock]() - start)
        assert metrics["updates"] == EPOCHS * MINI_BATCHES
        assert metrics["trained_tokens"] == EPOCHS * sum(len(row["response_ids"]) for row in rows)
    return seconds[1:]


def theirs(rows: list[dict[str, Any]], steps: int, batch: int, clock: str) -> list[float]:
    """Return the seconds of each step's four updates by TRL's GRPOTrainer."""
    import torch
    from agentrig_grpo.naming import model_directory
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(str(model_directory("mini")))
    pad = tokenizer.pad_token_id

    def padded(lists: list[list[Any]], fill: float, *, left: bool = False) -> torch.Tensor:
        longest = max(map(len, lists))
        filled = [[fill] * (longest - len(x)) for x in lists]
        return torch.tensor([f + x if left else x + f for x, f in zip(lists, filled, strict=True)])

    prompts, responses = ([list(r[name]) for r in rows] for name in ("prompt_ids", "response_ids"))
    fixed = {
        "prompt_ids": padded(prompts, pad, left=True),
        "prompt_mask": padded([[1] * len(p) for p in prompts], 0, left=True),
        "completion_ids": padded(responses, pad),
        "completion_mask": padded([[1] * len(r) for r in responses], 0),
        "advantages": torch.tensor([r["advantage"] for r in rows], dtype=torch.float32),
        "num_items_in_batch": torch.tensor(sum(map(len, responses))),
        "old_per_token_logps": padded([list(r["logprobs"]) for r in rows], 0.0),
    }
    begun: list[float] = []
    outside = [0.0]

    trained = [0]

    class Recorded(GRPOTrainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *given: Any, **more: Any) -> Any:
            trained[0] += int(inputs["completion_mask"].sum())
            return super().compute_loss(model, inputs, *given, **more)

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            now = CLOCKS[clock]()
            begun.append(now - outside[0])
            given = {name: tensor.clone() for name, tensor in fixed.items()}
            outside[0] += CLOCKS[clock]() - now
            return given

    with tempfile.TemporaryDirectory() as made:
        config = GRPOConfig(
            output_dir=made,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
            learning_rate=LR,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            max_grad_norm=NORM,
            epsilon=CLIP_LOW,
            epsilon_high=CLIP_HIGH,
            loss_type="dapo",
            beta=0.0,
            temperature=1.0,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=len(rows) // MINI_BATCHES // batch,
            steps_per_generation=len(rows) // batch,
            num_iterations=EPOCHS,
            num_generations=4,
            max_completion_length=max(map(len, responses)),
            max_steps=(steps + 2) * EPOCHS * MINI_BATCHES,
        )
        trainer = Recorded(
            model=AutoModelForCausalLM.from_pretrained(str(model_directory("mini")), dtype=torch.float32),
            reward_funcs=lambda completions, **more: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_dict({"prompt": ["x"] * len(rows)}),
            processing_class=tokenizer,
        )
        trainer.train()
    done, wanted = trainer.state.global_step, (steps + 2) * EPOCHS * MINI_BATCHES
    tokens = (steps + 2) * EPOCHS * sum(map(len, responses))
    if (done, trained[0]) != (wanted, tokens):
        raise SystemExit(f"TRL made {done} of {wanted} updates on {trained[0]} of {tokens} tokens")
    seconds = [b - a for a, b in pairwise(begun)]
    return seconds[1:]


def side(arguments: argparse.Namespace, name: str, python: str, file: Path, batch: int = 0) -> list[float]:
    command = [python, __file__, "--side", name, "--file", str(file), "--steps", str(arguments.steps)]
    command += ["--clock", arguments.clock]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(arguments.threads),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)) if name == "trl" else os.environ.get("PYTHONPATH", ""),
    }
    done = subprocess.run([*command, "--batch", str(batch)], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    found: list[float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", help="the Python that has TRL")
    parser.add_argument("--batch", default="16,32,64", help="TRL's rows in one pass; several with commas")
    parser.add_argument("--rows", choices=("gradient", "all"), default="gradient")
    parser.add_argument("--steps", type=int, default=5, help="of each process, each of four updates")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: seconds of all threads, where others work"
    )
    parser.add_argument("--side", choices=("ours", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        rows = json.loads(given.file.read_text("utf-8"))
        found = (
            ours(rows, given.steps, given.clock)
            if given.side == "ours"
            else theirs(rows, given.steps, int(given.batch), given.clock)
        )
        print(json.dumps(found))
        return
    if not given.trl:
        parser.error("--trl names the Python of an environment with TRL; see the text above")
    batches = [int(batch) for batch in given.batch.split(",")]
    with tempfile.TemporaryDirectory() as made:
        rows = recorded(Path(made))
        rows = [r for r in rows if r["advantage"] or given.rows == "all"]
        whole = MINI_BATCHES * max(batches)
        rows = rows[: len(rows) // whole * whole]
        file = Path(made) / "rows.json"
        file.write_text(json.dumps(rows), "utf-8")
        tokens = sum(len(r["prompt_ids"]) + len(r["response_ids"]) for r in rows)
        print(f"{len(rows)} rows ({given.rows}) of {len({r['rollout'] for r in rows})} rollouts, {tokens} tokens")
        seconds: dict[str, list[float]] = {}
        for _ in range(given.turns):
            seconds.setdefault("agentrig", []).extend(side(given, "ours", sys.executable, file))
            for batch in batches:
                seconds.setdefault(f"TRL, {batch} rows a pass", []).extend(side(given, "trl", given.trl, file, batch))
    rate = {name: len({r["rollout"] for r in rows}) / statistics.median(found) for name, found in seconds.items()}
    best = max((name for name in rate if name != "agentrig"), key=lambda name: rate[name])
    for name, found in seconds.items():
        print(
            f"{name}: {rate[name]:.1f} rollouts/s (median {statistics.median(found):.3f} s, least {min(found):.3f} s)"
        )
    version = "import importlib.metadata as m; print(m.version('trl'))"
    print(f"agentrig / {best}: {rate['agentrig'] / rate[best]:.2f}; {given.threads} threads; TRL", end=" ", flush=True)
    subprocess.run([given.trl, "-c", version], check=True)


if __name__ == "__main__":
    main()
