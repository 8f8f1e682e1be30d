"""The algorithm `gepa`, which improves an agent's prompts, and the server `endpoint`, which runs elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from agentrig import AlgorithmSpec, ServerSpec, hookimpl
from agentrig_prompts.config import EndpointConfig, GepaConfig


def build(config: GepaConfig) -> Any:
    """Return the algorithm; gepa is imported when it runs."""
    from agentrig_prompts.algorithm import Gepa

    return Gepa(config)


def build_server(config: EndpointConfig) -> Any:
    """Return what makes the server of a plan."""
    from agentrig_prompts.endpoint import EndpointServer

    return partial(EndpointServer, config)


@hookimpl
def register_algorithms() -> Iterable[AlgorithmSpec]:
    """Register `gepa`."""
    yield AlgorithmSpec(
        name="gepa",
        summary="Improves the agent's prompts by reflection on its rollouts; no weights change (GEPA).",
        config=GepaConfig,
        build=build,
        server=True,
        trains="prompts",
    )


@hookimpl
def register_servers() -> Iterable[ServerSpec]:
    """Register `endpoint`."""
    yield ServerSpec(
        name="endpoint",
        summary="A model behind an OpenAI-compatible address; its weights can't be trained.",
        config=EndpointConfig,
        build=build_server,
    )
