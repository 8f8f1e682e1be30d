"""The algorithm `gepa`, which improves an agent's prompts by reflection on its rollouts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from agentrig import AlgorithmSpec, hookimpl
from agentrig_prompts.config import GepaConfig


def build(config: GepaConfig) -> Any:
    """Return the algorithm."""
    from agentrig_prompts.algorithm import Gepa

    return Gepa(config)


@hookimpl
def register_algorithms() -> Iterable[AlgorithmSpec]:
    """Register `gepa`."""
    summary = "Improves the agent's prompts by reflection on its rollouts; no weights change (GEPA)."
    yield AlgorithmSpec(name="gepa", summary=summary, config=GepaConfig, build=build, server=True, trains="prompts")
