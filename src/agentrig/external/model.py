"""The server `endpoint`: a model that already runs behind an OpenAI-compatible address."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self

from agentrig.endpoints import Endpoint
from agentrig.external.config import EndpointConfig
from agentrig.servers import MakeServer, ServerError, ServerPlan


class EndpointServer:
    """Implements `agentrig.servers.Server` for a model that nobody here starts, ends or trains."""

    dtype, context = "", 0

    def __init__(self, config: EndpointConfig, plan: ServerPlan) -> None:
        endpoint = Endpoint.at(config.base_url, config.model, config.api_key, token_ids=config.token_ids)
        self.endpoints: Sequence[Endpoint] = [endpoint]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def take(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Refuse: the weights are not ours."""
        raise ServerError(
            'the server "endpoint" can\'t take new weights: leave [server] out to train weights, or train prompts'
        )

    def held(self) -> Sequence[Mapping[str, str]] | None:
        """Return None: nothing is known of its tensors."""
        return None

    def sleep(self) -> None:
        """Do nothing."""

    def wake(self) -> None:
        """Do nothing."""

    def check(self) -> None:
        """Do nothing: the rollouts show whether it answers."""


def make(config: EndpointConfig) -> MakeServer:
    """Return what makes the server of a plan."""
    return partial(EndpointServer, config)
