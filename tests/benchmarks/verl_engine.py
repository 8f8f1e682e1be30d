"""Log-probabilities and update of verl's engines on GPUs, without Ray and rollouts: verl's own, and shared tokens.

    python tests/benchmarks/verl_engine.py [--engines forest,verl] [--shape 1.5b|18m] [--rows 32x4x816+128 …]
        [--tokens 49152] [--micro 16] [--repeat 3] [--gpus 1] [--no-checkpointing] [--work DIR]

Rows are TASKSxNxPROMPT+RESPONSE random tokens. The engines are `forest`, `verl`, and `packed`: verl's own on rows
without padding, the second layout without shared tokens. The engine with shared tokens runs passes of `--tokens`
tokens (0: as many as `--micro` rows allow); verl's own runs micro-batches of `--micro` rows of the first shape, of
fewer rows where they are longer, with agentrig's log-probabilities of tokens. An update is forward, PPO loss,
backward, clipping and AdamW. Prints one JSON object for each engine and shape: the median seconds, tokens, peak memory,
and how far the log-probabilities of the first shape are from those of the first engine; further than `APART` is an
error, and so is another loss of the first update. With `--gpus N` the engines are sharded (FSDP) over N processes,
and each gets an equal share of the tasks; a time is that of the slowest, and tokens are those of all.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from verl_step import make_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

CUDA = torch.cuda.is_available()
APART = 0.05 if CUDA else 1e-4
"""Largest mean difference of two engines' log-probabilities, in bf16 on a GPU: above that they do not the same work."""

RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def rows_of(text: str, vocabulary: int) -> list[tuple[list[int], list[int], list[int]]]:
    """Return this process's random rows: prompt, response and mask."""
    groups, lengths = text.rsplit("x", 1)
    tasks, n = map(int, groups.split("x"))
    prompt, response = map(int, lengths.split("+"))
    chance = torch.Generator().manual_seed(0)

    def some(count: int) -> list[int]:
        return torch.randint(vocabulary, (count,), generator=chance).tolist()

    found = []
    for _ in range(tasks):
        start = some(prompt)
        found.append([(start, some(response), [1] * response) for _ in range(n)])
    if tasks % RANKS:
        raise SystemExit(f"{tasks} tasks cannot be shared equally by {RANKS} GPUs")
    return [row for group in found[RANK::RANKS] for row in group]


def make_engine(folder: Path, kind: str, *, checkpointing: bool) -> Any:
    """Return an initialized engine: bf16 with fp32 weights on a GPU, fp32 on a CPU."""
    from agentrig_verl import logprobs
    from agentrig_verl.engine import ForestEngine
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    logprobs.install()
    precision = {} if CUDA else {"mixed_precision": {"param_dtype": "fp32"}, "use_torch_compile": False}
    engine = (ForestEngine if kind == "forest" else FSDPEngineWithLMHead)(
        HFModelConfig(
            path=str(folder),
            load_tokenizer=False,
            override_config={"attn_implementation": "sdpa"},
            use_remove_padding=kind == "packed",
            enable_gradient_checkpointing=checkpointing,
        ),
        FSDPEngineConfig(strategy="fsdp" if CUDA else "fsdp2", **precision),
        FSDPOptimizerConfig(lr=1e-6, total_training_steps=10),
        CheckpointConfig(),
    )
    engine.initialize()
    return engine


def wait() -> float:
    """Wait for the device, and for those of the other processes; return the time."""
    if CUDA:
        torch.cuda.synchronize()
    if RANKS > 1:
        torch.distributed.barrier()
    return time.perf_counter()


def measure(engine: Any, kind: str, text: str, arguments: argparse.Namespace) -> tuple[dict[str, Any], list[Any]]:
    """Time an engine on rows; return the figures and the log-probabilities."""
    from verl.utils.flops_counter import FlopsCounter
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss
    from verl_engines import batch_of

    config = engine.model_config.hf_config
    rows = rows_of(text, config.vocab_size)
    longest = max(len(prompt) + len(response) for prompt, response, _ in rows)
    micro = 1
    while micro * 2 <= arguments.micro * 960 // longest and len(rows) % (micro * 2) == 0:
        micro *= 2
    settings = {
        "use_remove_padding": kind == "packed", "calculate_entropy": False,
        "global_batch_size": len(rows) * RANKS, "use_dynamic_bsz": kind == "forest" and bool(arguments.tokens),
        "max_token_len_per_gpu": arguments.tokens, "micro_batch_size_per_gpu": micro, "temperature": 1.0,
    }  # fmt: skip
    loss = partial(ppo_loss, config=FSDPActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True))
    scoring, updating, losses, found = [], [], [], []
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(arguments.repeat + 1):
        data = batch_of(rows, **{**settings, "calculate_entropy": True})
        start = wait()
        with engine.eval_mode():
            output = engine.infer_batch(data)["model_output"]
        scoring.append(wait() - start)
        if not found:
            found = [
                values[len(prompt) - 1 : -1].float().cpu()
                for values, (prompt, _, _) in zip(output["log_probs"].unbind(), rows, strict=True)
            ]
        data = batch_of(rows, **settings)
        start = wait()
        with engine.train_mode():
            updated = engine.train_batch(data, loss)
        updating.append(wait() - start)
        losses.append(sum(updated["loss"]))
    seconds = statistics.median(updating[1:])
    lengths = [len(prompt) + len(response) for prompt, response, _ in rows]
    figures = {
        "engine": kind, "gpus": RANKS, "rows": text, "log_probs_s": round(statistics.median(scoring[1:]), 3),
        "update_s": round(seconds, 3), "first_update_s": round(updating[0], 3),
        "first_loss": round(losses[0], 6),
        "tokens": sum(lengths) * RANKS, "tokens_s_gpu": round(sum(lengths) / seconds),
        "micro_batch": arguments.tokens if kind == "forest" else micro,
    }  # fmt: skip
    if kind == "forest":
        figures["computed"] = engine.tokens.computed // (arguments.repeat + 1)
        engine.tokens = type(engine.tokens)()
    if CUDA:
        achieved, promised = FlopsCounter(config).estimate_flops(lengths, seconds)
        figures["mfu"] = round(achieved / promised, 3)
        figures["memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    return figures, found


@contextlib.contextmanager
def group(work: Path) -> Any:
    """Start this process's group."""
    file = work / f"group-{os.environ.get('BENCH_GROUP', os.getpid())}"
    if not CUDA:
        from verl_engines import on_the_cpu

        with on_the_cpu(file, rank=RANK, ranks=RANKS):
            yield
        return
    import agentrig_verl.trainer  # noqa: F401  (as in a run)

    torch.cuda.set_device(RANK)
    torch.distributed.init_process_group("nccl", init_method=f"file://{file}", rank=RANK, world_size=RANKS)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def start_ranks(count: int, work: Path) -> None:
    shared = {
        **os.environ,
        "WORLD_SIZE": str(count),
        "BENCH_GROUP": str(os.getpid()),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    command = [sys.executable, *sys.argv, "--work", str(work)]
    ranks = [
        subprocess.Popen(
            command, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
        )
        for rank in range(count)
    ]
    try:
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            time.sleep(0.2)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if failed := [rank.returncode for rank in ranks if rank.returncode]:
        raise SystemExit(f"a process ended with status {failed[0]}")


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", default="forest,verl")
    parser.add_argument("--shape", default="1.5b")
    parser.add_argument("--rows", nargs="+", default=["32x4x816+128"])
    parser.add_argument("--tokens", type=int, default=49152)
    parser.add_argument("--micro", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--gpus", type=int, default=1, help="processes that share the model and the tasks")
    parser.add_argument("--no-checkpointing", action="store_true")
    parser.add_argument("--work", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    work = (arguments.work or Path(tempfile.mkdtemp(prefix="verl-engine-"))).resolve()
    if not (work / "model").is_dir():
        work.mkdir(parents=True, exist_ok=True)
        make_model(arguments.shape, work / "model", context=16384)
    if arguments.gpus > 1 and "RANK" not in os.environ:
        start_ranks(arguments.gpus, work)
        return
    with group(work):
        seen: dict[str, tuple[list[Any], float]] = {}
        for kind in arguments.engines.split(","):
            begin = wait()
            engine = make_engine(work / "model", kind, checkpointing=not arguments.no_checkpointing)
            started = wait() - begin
            if RANK == 0:
                print(json.dumps({"engine": kind, "start_s": round(started, 1)}), flush=True)
            for text in arguments.rows:
                figures, found = measure(engine, kind, text, arguments)
                if text in seen:  # both before any update of their own
                    others, loss = seen[text]
                    apart = torch.cat([(a - b).abs() for a, b in zip(found, others, strict=True)])
                    figures |= {"difference": round(float(apart.mean()), 5), "largest": round(float(apart.max()), 4)}
                    if not (apart.mean() <= APART and abs(figures["first_loss"] - loss) <= APART):
                        raise SystemExit(f"not the same work: {figures}, and a loss of {loss} before")
                elif text == arguments.rows[0]:
                    seen[text] = found, figures["first_loss"]
                if RANK == 0:
                    print(json.dumps(figures), flush=True)
            del engine
            gc.collect()
            if CUDA:
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
