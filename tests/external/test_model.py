"""The server `endpoint`: a model that runs elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrig import Secret
from agentrig.external.config import EndpointConfig
from agentrig.external.model import make
from agentrig.servers import ServerError, ServerPlan

HARDWARE: Any = None


def test_a_model_elsewhere_is_asked_with_its_key_and_cannot_be_trained() -> None:
    config = EndpointConfig(base_url="https://models.example/v1/", model="small", api_key=Secret("key"))
    with make(config)(ServerPlan(model=Path(), name="policy", hardware=HARDWARE)) as server:
        (endpoint,) = server.endpoints
        assert (endpoint.base_url, endpoint.model, endpoint.api_key) == ("https://models.example/v1", "small", "key")
        assert server.held() is None
        server.check()
        with pytest.raises(ServerError, match="can't take new weights"):
            server.take([], 1)
    with pytest.raises(ValueError, match="no address"):
        EndpointConfig(base_url="models.example", model="small")
