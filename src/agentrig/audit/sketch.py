"""What a learner leaves of the updates of an audited step, at the optimizer's door: a few numbers of each tensor."""

from __future__ import annotations

import json
import os
import random
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrig.audit.record import readable
from agentrig.audit.verdicts import CannotLook
from agentrig.text import json_kind
from agentrig.traces import mapping

if TYPE_CHECKING:
    import torch

PROJECTIONS = 4
"""Sums of a gradient's elements with random signs. One of them sees a change of the gradient e with a size of about
|e|; all four miss half of that with a probability of 2%."""

SPOTS = 16
"""Elements of each tensor whose update is followed."""

FEW = 4
"""Tensors that are followed in a step that is not audited."""

LARGEST = 1 << 29
"""Parameters of the largest model of which weights are kept, in host memory, and which the CPU computes with again."""

KEPT = 1 << 30
"""Bytes of weights before its updates that a step keeps, in host memory; two copies in any case."""

CHUNK = 1 << 22

FILE = "audit/step-{:05d}.json"

WITHOUT = "Restore it, or move it away: gradient and update are then not looked at"
"""What to do about a sketch that cannot be read."""


def projections(tensor: torch.Tensor, name: str) -> list[float]:
    """Return a tensor's L2 norm and its sums with random signs, the same signs for a name on every machine."""
    import torch

    flat = tensor.detach().reshape(-1)
    sums = torch.zeros(1 + PROJECTIONS, dtype=torch.float64, device=flat.device)
    for start in range(0, len(flat), CHUNK):
        part = flat[start : start + CHUNK].double()
        at = torch.arange(start, start + len(part), dtype=torch.int64, device=flat.device) + zlib.crc32(name.encode())
        mixed = at * 6364136223846793005 + 1442695040888963407  # 64-bit integers wrap around
        mixed = (mixed ^ (mixed >> 29)) * 2685821657736338717
        sums[0] += part.square().sum()
        for k in range(PROJECTIONS):
            sums[1 + k] += (part * (1 - 2 * ((mixed >> (40 + k)) & 1))).sum()
    sums[0] = sums[0].sqrt()
    found: list[float] = sums.tolist()
    return found


def spots(size: int, name: str) -> list[int]:
    """Return the places of the elements of a flattened tensor that are followed, from its name."""
    seed = zlib.crc32(name.encode())
    return sorted({(seed + i * 2654435761) % size for i in range(min(SPOTS, size))})


class Sketch:
    """Taken by the learner during one step; `take` right before each `optimizer.step()`, `after` right behind it.

    A learner gets one in each step and cannot tell which steps are audited.

    Args:
        whole: Whether it is audited; of other steps only the updates of `FEW` tensors are followed.

    Attributes:
        kept: The trained tensors before updates, by number from 0, in host memory; none if the auditor can't use them.
            That is before the first, and before as many as `KEPT` has room for: in step 2 the last, else any.
        updates: The numbers of each update.
    """

    def __init__(self, step: int, *, whole: bool = True) -> None:
        self.step = step
        self.kept: dict[int, dict[str, torch.Tensor]] = {}
        self.updates: list[dict[str, Any]] = []
        self.whole, self._random = whole, random.Random(f"updates {step}")

    def take(
        self,
        trained: Mapping[str, torch.Tensor],
        optimizer: torch.optim.Optimizer,
        calls: Sequence[tuple[str, str]],
        norm: float,
    ) -> None:
        """Note gradients, weights and moments.

        Args:
            trained: Name to parameter, with the gradient that the optimizer gets.
            optimizer: The optimizer.
            calls: The calls of the mini-batch, by rollout and span, those without a gradient too.
            norm: Of the whole gradient before clipping.
        """
        number = len(self.updates)
        if self.whole and sum(p.numel() for p in trained.values()) <= LARGEST:
            most = max(2, KEPT // sum(p.numel() * p.element_size() for p in trained.values()))
            chosen = self.step == 2 or self._random.random() * number < most - 1  # each but the first is as likely
            if len(self.kept) == most and chosen:
                del self.kept[self._random.choice([*self.kept][1:])]
            if len(self.kept) < most:
                self.kept[number] = {name: p.detach().to("cpu", copy=True) for name, p in trained.items()}
        tensors = {}
        for name in trained if self.whole else random.Random(self.step).sample(sorted(trained), min(FEW, len(trained))):
            p = trained[name]
            at, state = spots(p.numel(), name), optimizer.state.get(p) or {}
            tensors[name] = {
                "gradient": projections(p.grad, name) if self.whole and p.grad is not None else None,
                "at": at,
                "gradients": None if p.grad is None else _at(p.grad, at),
                "weights": _at(p, at),
                "means": _moment(state, 1, at),
                "squares": _moment(state, 2, at),
                "made": float(state.get("step", 0)),
            }
        self.updates.append({"calls": [list(call) for call in calls], "norm": norm, "tensors": tensors})

    def after(self, trained: Mapping[str, torch.Tensor], copies: Mapping[str, torch.Tensor] | None = None) -> None:
        """Note the weights after an update, and their bf16 copies if the model computes with such."""
        for name, seen in self.updates[-1]["tensors"].items():
            seen["after"] = _at(trained[name], seen["at"])
            seen["copies"] = _at(copies[name], seen["at"]) if copies else None

    def write(self, run: Path) -> None:
        """Write the numbers into a run directory; the weights before are not among them."""
        file = run / FILE.format(self.step)
        file.parent.mkdir(exist_ok=True)
        part = file.with_suffix(".part")
        part.unlink(missing_ok=True)  # a link would lead out of the run
        part.write_text(json.dumps({"format": 1, "step": self.step, "updates": self.updates}), "utf-8")
        part.replace(file)

    @classmethod
    def read(cls, run: Path, step: int) -> Sketch | None:
        """Return the sketch of a step; None if none was taken.

        Raises:
            RunFileError: The file, or its folder, is no JSON or may not be read.
            CannotLook: The file has values of other types than `write` gives them.
        """
        file = run / FILE.format(step)
        if os.path.lexists(file.parent):
            with readable(file.parent, WITHOUT):
                os.scandir(file.parent).close()
        if not os.path.lexists(file):
            return None
        found = cls(step)
        with readable(file, WITHOUT):
            found.updates = json.loads(file.read_text("utf-8"))["updates"]
        if wrong := _wrong(found.updates):
            raise CannotLook(f"{FILE.format(step)} is damaged: {wrong}")
        return found


MAYBE = ("gradient", "gradients", "means", "squares", "copies")
"""The lists of a tensor that may be null."""


def _wrong(updates: Any) -> str:
    """Return which value of a sketch is of another type than the auditor computes with; '' if none is."""
    if not isinstance(updates, list):
        return f"updates is {json_kind(updates)}, not a list"
    for update in updates:
        calls, norm, tensors = (mapping(update).get(key) for key in ("calls", "norm", "tensors"))
        pairs = isinstance(calls, list) and all(isinstance(call, list) and len(call) == 2 for call in calls)
        if not (pairs and isinstance(norm, int | float) and isinstance(tensors, dict)):
            return "an update lacks its calls, norm or tensors"
        for name, seen in tensors.items():
            seen = mapping(seen)
            lists = [seen.get(key) for key in ("at", "weights", "after")]
            lists += [seen[key] for key in MAYBE if seen.get(key) is not None]
            numbers = all(isinstance(each, list) and all(isinstance(x, int | float) for x in each) for each in lists)
            if not (numbers and isinstance(seen.get("made"), int | float)):
                return f"{name} lacks its numbers"
    return ""


def _at(tensor: torch.Tensor, at: Sequence[int]) -> list[float]:
    import torch

    found: list[float] = tensor.detach().reshape(-1)[torch.tensor(at, device=tensor.device)].double().tolist()
    return found


def _moment(state: Mapping[str, Any], number: int, at: Sequence[int]) -> list[float] | None:
    """Return elements of a moment; bitsandbytes keeps one in 8 bits as places in a table, with a scale a block."""
    kept = state.get(("exp_avg", "exp_avg_sq")[number - 1], state.get(f"state{number}"))
    if kept is None:
        return None
    if not kept.dtype.is_floating_point:
        scales, table = state[f"absmax{number}"].reshape(-1), state[f"qmap{number}"]
        block = -(-kept.numel() // len(scales))
        values, of_blocks = _at(table, [int(i) for i in _at(kept, at)]), _at(scales, [i // block for i in at])
        return [value * scale for value, scale in zip(values, of_blocks, strict=True)]
    return _at(kept, at)
