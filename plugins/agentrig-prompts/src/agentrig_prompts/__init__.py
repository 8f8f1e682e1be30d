"""Algorithms that improve an agent's prompts by reflection on its rollouts: `gepa` and `apo`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from agentrig import AlgorithmSpec, hookimpl
from agentrig_prompts.config import ApoConfig, GepaConfig


def build(config: GepaConfig) -> Any:
    """Return the algorithm."""
    from agentrig_prompts.apo import ApoSearch
    from agentrig_prompts.gepa import GepaSearch

    return ApoSearch(config) if isinstance(config, ApoConfig) else GepaSearch(config)


@hookimpl
def register_algorithms() -> Iterable[AlgorithmSpec]:
    """Register `gepa` and `apo`."""
    how = "Improves the agent's prompts by reflection on its rollouts; no weights change (GEPA)."
    yield AlgorithmSpec(name="gepa", summary=how, config=GepaConfig, build=build, server=True, trains="prompts")
    how = "Improves the agent's prompts by textual gradients, with a beam; no weights change (APO)."
    yield AlgorithmSpec(name="apo", summary=how, config=ApoConfig, build=build, server=True, trains="prompts")
