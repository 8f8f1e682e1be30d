"""Digests of a step: what `agentrig replay` compares a repeated step with, cheap enough for every step."""

from __future__ import annotations

import hashlib
import math
import platform
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch  # noqa: TID253  (imported with the learner only)

from agentrig.algorithms import WeightDifference

if TYPE_CHECKING:
    from agentrig_grpo.learner import TrainSample

ODD = -7046029254386353131
"""2^64 divided by the golden ratio, as a signed 64-bit number: an odd factor whose multiples are well spread."""

CHUNK = 1 << 20
"""Numbers of 8 bytes that are summed at once."""


def text_digest(parts: Iterable[object]) -> str:
    """Return the BLAKE2b digest, 16 hexadecimal characters, of the `repr` of parts."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(repr(part).encode() + b"\0")
    return digest.hexdigest()


@torch.no_grad()
def tensor_digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return a digest, 16 hexadecimal characters, for each group of tensors: a layer, or a tensor outside of layers.

    The bits of a tensor are read as integers of 8 bytes and summed modulo 2^64, each times an odd number that depends
    on its place. Sums of integers do not depend on the order of summation, so a GPU and a CPU get the same digest of
    the same bits. One changed number always changes the digest; other differences do so with a probability of
    about 1 - 2^-64, unless somebody makes them for that purpose: it is a checksum, and no proof against forgery.
    """
    names = list(tensors)
    if not names:
        return {}
    sums = torch.stack([_sum(tensors[name]).cpu() for name in names]).tolist()
    groups: dict[str, list[str]] = defaultdict(list)
    for name, value in zip(names, sums, strict=True):
        groups[group_of(name)].append(f"{name}={value}")
    return {group: text_digest(parts) for group, parts in groups.items()}


def group_of(name: str) -> str:
    """Return a tensor's group: its name up to the number of its layer; the whole name without such a number."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts) - 1)
    return ".".join(parts[: number + 1])


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().view(-1)
    odd_bytes = flat.numel() * flat.element_size() % 8
    if odd_bytes:
        flat = torch.cat([flat, flat.new_zeros((8 - odd_bytes) // flat.element_size())])
    elif flat.data_ptr() % 8:
        flat = flat.clone()
    bits = flat.view(torch.int64)
    factors = torch.arange(min(CHUNK, max(len(bits), 1)), device=bits.device).mul_(ODD).bitwise_or_(1)
    total = torch.tensor(tensor.numel(), device=bits.device)
    for start in range(0, len(bits), CHUNK):
        part = bits[start : start + CHUNK]
        total = total * ODD + (part * factors[: len(part)]).sum()
    return total


def state_digest(trained: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer, updates: int) -> str:
    """Return one digest of what a step begins with: the trained weights, the optimizer's moments and the updates."""
    moments: dict[str, torch.Tensor] = {}
    for name, parameter in trained.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                moments[f"{name}.{key}"] = value
    return text_digest([updates, sorted(tensor_digests({**trained, **moments}).items())])


def advantages_digest(samples: Sequence[TrainSample]) -> str:
    """Return the digest of each trained rollout's advantage."""
    return text_digest(sorted({(sample.rollout, sample.advantage) for sample in samples}))


def samples_digest(samples: Sequence[TrainSample]) -> str:
    """Return the digest of a step's samples, in their order: tokens, log-probabilities, rollout and group."""
    digest = hashlib.blake2b(digest_size=8)
    for s in samples:
        digest.update(f"{s.rollout} {s.group} {len(s.prompt_ids)} {len(s.response_ids)} {s.logprobs is None}".encode())
        digest.update(array("q", s.prompt_ids).tobytes() + array("q", s.response_ids).tobytes())
        digest.update(array("d", s.logprobs or ()).tobytes())
    return digest.hexdigest()


def made_with(device: torch.device, dtype: str) -> dict[str, Any]:
    """Return what must be the same for a repeated step to be the same bit for bit."""
    found: dict[str, Any] = {"torch": torch.__version__, "device": device.type, "dtype": dtype}
    if device.type == "cpu":
        capability = torch.backends.cpu.get_cpu_capability()
        return {**found, "processor": f"{_processor()}, {capability}", "threads": torch.get_num_threads()}
    return {**found, "processor": str(torch.get_device_module(device).get_device_name(device))}


def _processor() -> str:
    """Return the processor's name; its architecture where the system does not tell."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text("utf-8", errors="replace").splitlines() if file.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def weight_difference(
    new: Mapping[str, torch.Tensor], recorded: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor]
) -> WeightDifference:
    """Return how far a step's repeated weights are from the recorded ones.

    Args:
        new: The weights that the repeated step made.
        recorded: Those that the run made.
        before: Those that both began with.
    """
    largest, squares, changes = 0.0, 0.0, 0.0
    for name, tensor in new.items():
        there = recorded[name].to(tensor.device, torch.float64)
        difference = tensor.detach().double() - there
        largest = max(largest, float(difference.abs().max()))
        squares += float(difference.square().sum())
        changes += float((there - before[name].to(tensor.device, torch.float64)).square().sum())
    relative = math.sqrt(squares / changes) if changes else math.inf if squares else 0.0
    return WeightDifference(largest=largest, relative=relative, digests=tensor_digests(recorded))
