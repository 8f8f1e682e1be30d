"""Digests of a step: what `agentrig replay` compares a repeated step with, cheap enough for every step."""

from __future__ import annotations

import hashlib
import math
import platform
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch  # noqa: TID253  (imported with the learner only)

from agentrig.algorithms import WeightDifference
from agentrig.delivery.digests import begun

if TYPE_CHECKING:
    from agentrig_grpo.samples import TrainSample


def text_digest(parts: Iterable[object]) -> str:
    """Return the BLAKE2b digest, 16 hexadecimal characters, of the `repr` of parts."""
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        found.update(repr(part).encode() + b"\0")
    return found.hexdigest()


@torch.no_grad()
def tensor_digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return a digest (`agentrig.delivery.digests`) for each group of tensors: a layer, or a tensor outside of layers.

    The tensors of a layer are joined in the order of their names, because small ones cost as much as large ones.
    """
    return begun(_groups(tensors)).result()


def _groups(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for name in sorted(tensors):
        groups[group_of(name)].append(name)
    return ((group, _joined([tensors[name] for name in names])) for group, names in groups.items())


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of tensors of one device, one after the other."""
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat([t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors])


def group_of(name: str) -> str:
    """Return a tensor's group: its name up to the number of its layer; the whole name without such a number."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts) - 1)
    return ".".join(parts[: number + 1])


@torch.no_grad()
def state_digest(
    trained: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer, updates: int
) -> Callable[[], str]:
    """Return what returns one digest of what a step begins with: trained weights, the optimizer's moments and updates.

    The device sums them while the host goes on, and what is returned waits for it.
    """
    moments: dict[str, torch.Tensor] = {}
    for name, parameter in trained.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if key != "step":  # `updates` counts the steps
                moments[f"{name}.{key}"] = value
    sums = begun(_groups({**trained, **moments}))
    return lambda: text_digest([updates, sorted(sums.result().items())])


def advantages_digest(samples: Sequence[TrainSample]) -> str:
    """Return the digest of each trained rollout's advantage."""
    return text_digest(sorted({(sample.rollout, sample.advantage) for sample in samples}))


def samples_digest(samples: Sequence[TrainSample]) -> str:
    """Return the digest of a step's samples, in their order: tokens, log-probabilities, rollout and group."""
    found = hashlib.blake2b(digest_size=8)
    for s in samples:
        found.update(f"{s.rollout} {s.group} {len(s.prompt_ids)} {len(s.response_ids)} {s.logprobs is None}".encode())
        found.update(array("q", s.prompt_ids).tobytes() + array("q", s.response_ids).tobytes())
        found.update(array("d", s.logprobs or ()).tobytes())
    return found.hexdigest()


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
