"""What the proof of delivery costs: seconds of a step with it and without it, and its own share.

    python tests/benchmarks/delivery.py [--steps 6] [--model DIR] [--hidden 512 --layers 8] [--lora 0] [--json]

Without --model and --hidden it is the recipe `mini`, with its own tasks, group size and agents. With --hidden a random
Qwen2 of that shape replaces the shipped model (hidden 512, 8 layers, FFN 1536: about 30 million parameters);
its answers are wrong, so the run trains on random rewards that a plugin file of this script gives. Each run is a
process of its own: `agentrig train` with run.delivery true and false, in turns, after one run that is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PLUGIN = '''
"""A reward that any answer gets at random: the cost of a step does not depend on what is learned."""
import hashlib

import attrs

from agentrig import RewardSpec, Score, hookimpl


@attrs.frozen(kw_only=True)
class Nothing:
    """No settings."""


class Random:
    """Pays by the answer's digest."""

    def __init__(self, config):
        pass

    def __call__(self, task, outcome, budget_s):
        """Score an answer."""
        return Score.ok(float(hashlib.sha256(repr(outcome.answer).encode()).digest()[0] % 2))


@hookimpl
def register_rewards():
    """Bring `random`."""
    yield RewardSpec(name="random", summary="Random.", config=Nothing, build=Random)
'''


def random_model(directory: Path, hidden: int, layers: int) -> Path:
    """Write a random Qwen2 with the tokenizer of the shipped model."""
    import torch
    from agentrig_grpo import checkpoint
    from agentrig_grpo.naming import model_directory
    from transformers import AutoConfig, AutoModelForCausalLM

    source = model_directory("mini")
    config = AutoConfig.from_pretrained(str(source))
    config.hidden_size, config.num_hidden_layers, config.intermediate_size = hidden, layers, 3 * hidden
    config.num_attention_heads, config.num_key_value_heads = hidden // 64, max(1, hidden // 256)
    config.layer_types = ["full_attention"] * layers
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    checkpoint.save(model, checkpoint.load_tokenizer(source), directory)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} million parameters", file=sys.stderr)
    return directory


def train(folder: Path, name: str, *, on: bool, steps: int, words: list[str]) -> list[dict[str, Any]]:
    """Run the recipe and return its lines of metrics."""
    command = [sys.executable, "-m", "agentrig", "train", "mini", f"run.name={name}", f"run.directory={folder}"]
    command += [
        f"algorithm.steps={steps}",
        "algorithm.validate_every=0",
        "run.report_tasks=1",
        "run.validation_tasks=1",
    ]
    subprocess.run([*command, f"run.delivery={str(on).lower()}", *words], check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text("utf-8").splitlines()]


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="of each run; the first is not counted")
    parser.add_argument("--turns", type=int, default=2, help="runs with and without")
    parser.add_argument("--model", default="", help="a Hugging Face directory instead of the shipped model")
    parser.add_argument("--hidden", type=int, default=0, help="make a random model of this width")
    parser.add_argument("--layers", type=int, default=8, help="and of so many blocks")
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        words = [f"algorithm.lora_rank={given.lora}"]
        model = given.model or (given.hidden and str(random_model(folder / "model", given.hidden, given.layers)))
        if model:
            (folder / "random_reward.py").write_text(PLUGIN, "utf-8")
            words += [f"algorithm.model={model}", "--plugin", str(folder / "random_reward.py"), "--reward", "random"]
        seconds: dict[bool, list[float]] = {True: [], False: []}
        shares: list[float] = []
        for turn in range(given.turns + 1):
            for on in (True, False):
                lines = train(folder, f"{turn}-{on}", on=on, steps=given.steps, words=words)[1:]
                if turn:
                    seconds[on] += [line["step_s"] for line in lines]
                    shares += [line["delivery"]["seconds"] / line["step_s"] for line in lines if on]
        found = {
            "step_s_with": statistics.median(seconds[True]),
            "step_s_without": statistics.median(seconds[False]),
            "share_of_step": statistics.median(shares),
            "steps": len(seconds[True]),
        }
    print(json.dumps(found) if given.json else "\n".join(f"{name}: {value:.4g}" for name, value in found.items()))


if __name__ == "__main__":
    main()
