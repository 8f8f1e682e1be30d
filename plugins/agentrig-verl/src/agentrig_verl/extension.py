"""vLLM's workers report which weights they use: the digest of each of the learner's tensors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentrig.delivery.digests import Digests

if TYPE_CHECKING:
    import torch

CLASS = f"{__name__}.DigestExtension"
"""The value of vLLM's option `worker_extension_cls`."""

FUSED: Mapping[str, Sequence[str]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""The layers that vLLM joins into one, in the order of their rows."""


def held(parameters: Mapping[str, torch.Tensor], shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return the digest of the server's copy of each of the learner's tensors, by the learner's name.

    Args:
        parameters: The server's parameters by its own names; it joins those of `FUSED` layers and may pad a vocabulary.
        shapes: Name to shape of the learner's tensors.

    Returns:
        Name to digest; tensors that the server splits or quantizes (tensor parallelism) are left out.
    """
    found = Digests()
    for name, shape in shapes.items():
        place = _place(name, parameters, shapes)
        if place is not None and list(place.shape) == list(shape):
            found.add(name, place)
    return found.result()


def _place(
    name: str, parameters: Mapping[str, torch.Tensor], shapes: Mapping[str, Sequence[int]]
) -> torch.Tensor | None:
    whole = parameters.get(name)
    if whole is not None:
        return whole[: shapes[name][0]] if whole.ndim and shapes[name] else whole
    for fused, parts in FUSED.items():
        layer, _, kind = name.rpartition(".")
        head, _, part = layer.rpartition(".")
        if part not in parts:
            continue
        whole = parameters.get(f"{head}.{fused}.{kind}")
        rows = [shapes.get(f"{head}.{each}.{kind}", [0])[0] for each in parts]
        if whole is None or whole.shape[0] != sum(rows):
            return None
        start = sum(rows[: parts.index(part)])
        return whole[start : start + rows[parts.index(part)]]
    return None


def __getattr__(name: str) -> Any:
    """Define the extension when vLLM imports it: its base class, verl's extension, imports vLLM."""
    if name != "DigestExtension":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

    class DigestExtension(vLLMColocateWorkerExtension):  # type: ignore[misc]
        """verl's extension of vLLM's workers, which also writes digests."""

        def write_digests(self, file: str, shapes: dict[str, list[int]]) -> None:
            """Write name to digest into a file: verl's server returns no result of such a call."""
            if getattr(self, "rank", 0) != 0:
                return
            found = held(dict(self.model_runner.model.named_parameters()), shapes)
            with open(f"{file}.part", "w", encoding="utf-8") as part:
                json.dump(found, part)
            os.replace(f"{file}.part", file)

    globals()[name] = DigestExtension
    return DigestExtension
