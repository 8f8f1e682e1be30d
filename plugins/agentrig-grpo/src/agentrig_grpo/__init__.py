"""The algorithm `grpo`: group-relative policy optimization in torch, with its own LLM server."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from agentrig import AlgorithmSpec, hookimpl
from agentrig_grpo.config import GrpoConfig

if TYPE_CHECKING:
    from agentrig.algorithms import Algorithm
    from agentrig.hardware.memory import Workload


def build(config: GrpoConfig) -> Algorithm:
    """Build the algorithm; torch is imported here."""
    from agentrig_grpo.algorithm import Grpo

    return Grpo(config)


def workload(config: GrpoConfig) -> Workload | None:
    """Say what training asks of the device, for the doctor; None when there is no such model."""
    from agentrig.errors import ConfigError
    from agentrig.hardware.memory import Workload
    from agentrig_grpo.naming import model_directory

    try:
        model = model_directory(config.model)
    except ConfigError:
        return None
    context = config.max_length or 4096
    return Workload(
        model=str(model),
        micro_batch=max(1, config.tokens_per_batch // context),
        context=context,
        trained=0.01 if config.lora_rank else 1.0,
        sequences=config.server_batch,
    )


@hookimpl
def register_algorithms() -> Iterable[AlgorithmSpec]:
    """Bring `grpo`."""
    yield AlgorithmSpec(
        name="grpo",
        summary="Group-relative policy optimization in torch with its own LLM server, for a CPU or one device.",
        config=GrpoConfig,
        build=build,
        workload=workload,
    )
