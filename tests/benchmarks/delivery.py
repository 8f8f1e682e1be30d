"""What the proof of delivery costs: seconds of a step with it and without it, side by side.

    python tests/benchmarks/delivery.py                                          # recipe `mini`, runs in turns
    python tests/benchmarks/delivery.py --hidden 512 --layers 8                  # a random Qwen2 of 30M parameters
    python tests/benchmarks/delivery.py --hardware cuda --shape 0.5b --blocks    # on a GPU, in one run

In turns: `agentrig train` with run.delivery true and false, each a process of its own with the same seed, so that step
k of the one does the same work as step k of the other; the first step is not counted. The difference is the median over
these pairs. With --blocks one run proves every other three transfers (`delivery_blocks.py`): for models whose start
takes long. With --shape the run is that of `embedded_gpu.py`: random weights, prompts of 1,000 tokens. A line is
printed after each run, and the last one has all. `verl_step.py --delivery-blocks` measures the same with verl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "random_policy"))
import delivery_blocks
import plugin
import start

BLOCKS = Path(__file__).with_name("delivery_blocks.py")
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
    """Register `random`."""
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


def words_of(given: argparse.Namespace, folder: Path) -> list[str]:
    """Make the model and return the words of `agentrig train`."""
    words = ["train"]
    if given.shape:
        texts = [plugin.paragraph(i, 400) for i in range(50)]
        model = folder / "model"
        start.make(model, family="qwen2", shape=given.shape, context=1064 + given.max_tokens, texts=texts)
        words += ["--plugin", str(Path(plugin.__file__)), "--tasks", "paragraphs", "--agent", "reader"]
        words += ["--reward", "letters", "--adapter", "agent-match", "--algorithm", "grpo", "adapter.match=reader"]
        words += ["tasks.words=990", f"tasks.tasks={max(given.tasks, 4)}", f"algorithm.model={model}", "run.seed=0"]
        words += [f"algorithm.tasks_per_step={given.tasks}", "algorithm.group_size=8", "algorithm.lr=1e-5"]
        words += [f"algorithm.max_tokens={given.max_tokens}", "runners.n=2", "runners.threads=32"]
        words += [f"algorithm.gradient_checkpointing={str(given.hardware != 'cpu').lower()}"]
    else:
        words += ["mini"]
        model = given.model or (given.hidden and random_model(folder / "model", given.hidden, given.layers))
        if model:
            (folder / "random_reward.py").write_text(PLUGIN, "utf-8")
            words += [f"algorithm.model={model}", "--plugin", str(folder / "random_reward.py"), "--reward", "random"]
    words += ["--hardware", given.hardware, f"algorithm.lora_rank={given.lora}", f"algorithm.steps={given.steps}"]
    return [*words, "algorithm.validate_every=0", f"algorithm.save_every={given.steps}", "run.report_tasks=1",
            "run.validation_tasks=1", f"run.directory={folder}", *given.more]  # fmt: skip


def train(folder: Path, name: str, words: list[str], *, timeout_s: float) -> list[dict[str, Any]]:
    """Run `agentrig` and return its lines of metrics; a run that takes too long gives those that it has."""
    command = [sys.executable, "-m", "agentrig", *words, f"run.name={name}"]
    with (folder / f"{name}.log").open("wb") as log:
        try:
            subprocess.run(command, check=True, stdout=log, stderr=log, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            print(f"{name}: stopped after {timeout_s:.0f} s", file=sys.stderr)
        except subprocess.CalledProcessError:
            print((folder / f"{name}.log").read_text(errors="replace")[-3000:], file=sys.stderr)
            raise
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text("utf-8").splitlines()]


def in_turns(given: argparse.Namespace, folder: Path, words: list[str]) -> dict[str, Any]:
    """Run with and without in turns, and compare the same steps."""
    begun, longest = time.monotonic(), 0.0
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for turn in range(given.turns):
        left = given.limit_s - (time.monotonic() - begun)
        if turn and left < 2 * longest:
            break
        found = {}
        for on in ((True, False), (False, True))[turn % 2]:
            clock = time.monotonic()
            lines = train(folder, f"{turn}-{on}", [*words, f"run.delivery={str(on).lower()}"], timeout_s=given.limit_s)
            longest, found[on] = max(longest, time.monotonic() - clock), lines[1:]
        pairs += zip(found[True], found[False], strict=False)
        gaps = [one["step_s"] - other["step_s"] for one, other in pairs]
        figures = delivery_blocks.summary(
            [one["step_s"] for one, _ in pairs],
            [other["step_s"] for _, other in pairs],
            [one["delivery"]["seconds"] for one, _ in pairs],
            [one["delivery"]["background_s"] for one, _ in pairs],
        )
        figures["difference_ms"] = [round(1000 * gap, 1) for gap in delivery_blocks.spread(gaps)]
        middle = statistics.median(other["step_s"] for _, other in pairs)
        figures["share_by_pairs"] = round(statistics.median(gaps) / middle, 5)
        print(json.dumps({"turns": turn + 1, **figures}), flush=True)
    return figures


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="of each run")
    parser.add_argument("--turns", type=int, default=4, help="runs with and without")
    parser.add_argument("--blocks", action="store_true", help="measure both in one run")
    parser.add_argument("--hardware", default="cpu", help="cpu or cuda")
    parser.add_argument("--shape", choices=tuple(start.SHAPES), help="random weights of this shape")
    parser.add_argument("--tasks", type=int, default=16, help="with --shape: tasks of a step, each with 8 rollouts")
    parser.add_argument("--max-tokens", type=int, default=128, help="with --shape: of an answer")
    parser.add_argument("--model", default="", help="a Hugging Face directory instead of the shipped model")
    parser.add_argument("--hidden", type=int, default=0, help="make a random model of this width")
    parser.add_argument("--layers", type=int, default=8, help="and of so many blocks")
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters")
    parser.add_argument("--limit-s", type=float, default=3600, help="begin no run that would end later; seconds")
    parser.add_argument("more", nargs="*", metavar="KEY=VALUE", help="more words for agentrig train")
    given = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory(prefix="delivery-") as made:
        folder = Path(made)
        words = words_of(given, folder)
        if given.blocks:
            lines = train(folder, "blocks", [*words, "--plugin", str(BLOCKS)], timeout_s=given.limit_s)
            for line in lines:
                told = line.get("delivery", {})
                parts = {name: round(value, 3) for name, value in line["time_s"].items()}
                print(line["step"], round(line["step_s"], 3), parts, round(told.get("seconds", 0), 4), flush=True)
            figures = delivery_blocks.figures(lines, folder / "blocks" / "cpu.jsonl")
        else:
            figures = in_turns(given, folder, words)
    what = given.shape or given.model or (f"{given.hidden} x {given.layers}" if given.hidden else "mini")
    print(json.dumps({"model": what, "hardware": given.hardware, "lora": given.lora, **figures}))


if __name__ == "__main__":
    main()
