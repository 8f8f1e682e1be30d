"""vLLM's workers report which weights they use: the digest of each of the learner's tensors."""

from __future__ import annotations

import json
import os
from typing import Any

from agentrig.delivery.digests import held

CLASS = f"{__name__}.DigestExtension"
"""The value of vLLM's option `worker_extension_cls`."""


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
