"""The server `embedded` without a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import httpx
from agentrig_grpo.config import EmbeddedConfig
from agentrig_grpo.server.handle import Embedded

from agentrig.hardware import Cpu
from agentrig.servers import ServerPlan


def embedded(
    model: str | Path,
    *,
    name: str = "tiny",
    slots: int = 64,
    max_length: int = 0,
    device: str = "cpu",
    dtype: str = "float32",
    log: Path | None = None,
    **keys: Any,
) -> Embedded:
    """Return a server of a model's directory, not started; `keys` are others of `[server]`."""
    hardware = attrs.evolve(Cpu(), torch_device=device)
    plan = ServerPlan(model=Path(model), name=name, hardware=hardware, dtype=dtype, context=max_length, log=log)
    return Embedded(EmbeddedConfig(batch=slots, **{"threads": 1, **keys}), plan)


def health(server: Embedded) -> dict[str, Any]:
    """Return what its `/health` says: status, version, counts of steps, tokens, prompts and prefills."""
    headers = {"Authorization": f"Bearer {server.api_key}"}
    url = f"http://127.0.0.1:{server.port}/health"
    answer: dict[str, Any] = httpx.get(url, headers=headers, timeout=60).raise_for_status().json()
    return answer
