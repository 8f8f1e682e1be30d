"""Algorithms that improve an agent's prompts by reflection on its rollouts: `gepa` and `apo`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from agentrig import AlgorithmSpec, hookimpl
from agentrig_prompts.config import ApoConfig, GepaConfig


def build_gepa(config: GepaConfig) -> Any:
    """Return `gepa`."""
    from agentrig_prompts.gepa import GepaSearch
    from agentrig_prompts.search import PromptAlgorithm

    return PromptAlgorithm(config, GepaSearch)


def build_apo(config: ApoConfig) -> Any:
    """Return `apo`."""
    from agentrig_prompts.apo import ApoSearch
    from agentrig_prompts.search import PromptAlgorithm

    return PromptAlgorithm(config, ApoSearch)


@hookimpl
def register_algorithms() -> Iterable[AlgorithmSpec]:
    """Register `gepa` and `apo`."""
    how = "Improves the agent's prompts by reflection on its rollouts; no weights change (GEPA)."
    yield AlgorithmSpec(name="gepa", summary=how, config=GepaConfig, build=build_gepa, server=True, trains="prompts")
    how = "Improves the agent's prompts by textual gradients, with a beam; no weights change (APO)."
    yield AlgorithmSpec(name="apo", summary=how, config=ApoConfig, build=build_apo, server=True, trains="prompts")
