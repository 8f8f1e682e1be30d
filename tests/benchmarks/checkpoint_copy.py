"""What a checkpoint costs on a CPU: `python tests/benchmarks/checkpoint_copy.py [--shape 135m] [--repeats 5]`.

Weights and two moments in fp32 are saved in turns by `torch.distributed.checkpoint.async_save` and as a run of grpo
does it, which lists the digests of its files too. As soon as the training may go on, each tensor is changed in place.
Prints medians of the seconds that the training waits, of those until all is on the disk, of the CPU seconds, which say
more on a busy machine, and of the bytes. Fails unless each side reads back every tensor as it was before that change.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from agentrig_grpo import trainer_files
from agentrig_grpo.host_copy import HostCopy
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentrig.run.checkpoints import Checkpoints
from agentrig.run.saving import Saving

sys.path.insert(0, str(Path(__file__).parent))
import verl_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=tuple(verl_step.SHAPES), default="135m")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**verl_step.SHAPES[options.shape]))
    trained = {name: torch.randn(p.shape) for name, p in model.named_parameters()}
    moments = {i: {"exp_avg": w.clone(), "exp_avg_sq": w.square()} for i, w in enumerate(trained.values())}
    state = {"trained": trained, "optimizer": {"state": moments}, "updates": 1, "kept": None}
    found: dict[str, list[tuple[float, ...]]] = {"agentrig": [], "torch": []}
    for _ in range(options.repeats):
        for side, seen in found.items():
            with tempfile.TemporaryDirectory(prefix="agentrig-checkpoint-") as folder:
                seen.append(saved(side, state, Path(folder)))
    for side, seen in found.items():
        print(side, "medians:", *map(statistics.median, zip(*seen, strict=True)))


def saved(side: str, state: dict[str, Any], folder: Path) -> tuple[float, ...]:
    """Save a state, change it, read it back; return seconds waited, until complete and of the CPU, and bytes."""
    begun, used = time.perf_counter(), time.process_time()
    complete: Callable[[], object]
    if side == "torch":
        complete = dcp.async_save(state, checkpoint_id=folder, no_dist=True).result
    else:
        saving = Saving(1)

        def copied() -> Callable[[], object]:
            copy = HostCopy(torch.device("cpu")).take(state)
            return lambda: Checkpoints(folder).save(1, lambda part: trainer_files.write(part, copy), keep=False)

        saving.save(copied)
        complete = saving.settle
    waited = time.perf_counter() - begun
    for tensor in tensors_of(state):
        tensor.neg_()
    complete()
    whole, used = time.perf_counter() - begun, time.process_time() - used
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{side}: {waited:.2f} s, {whole:.2f} s, CPU {used:.2f} s, {size:,} bytes", file=sys.stderr, flush=True)
    if side == "torch":
        read = tree_map_only(torch.Tensor, torch.zeros_like, state)
        dcp.load(read, checkpoint_id=folder, no_dist=True)
    else:
        read = trainer_files.read(Checkpoints(folder).path(1))
    if not all(torch.equal(old, -new) for old, new in zip(tensors_of(read), tensors_of(state), strict=True)):
        raise SystemExit(f"{side} did not save the state as it was")
    return waited, whole, used, size


def tensors_of(state: dict[str, Any]) -> list[torch.Tensor]:
    return [value for value in tree_leaves(state) if isinstance(value, torch.Tensor)]


if __name__ == "__main__":
    main()
