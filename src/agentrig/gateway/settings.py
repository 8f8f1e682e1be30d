"""Section `[gateway]` of a run."""

from __future__ import annotations

from typing import Any

import attrs

from agentrig.gateway.models import FixedModel, models_of
from agentrig.settings import setting


def _checked(_config: Any, _field: Any, value: dict[str, Any]) -> None:
    """Reject models of another form, and a key that is not there."""
    for name, model in models_of(value).items():
        if model is not None:
            model.endpoint(name)


@attrs.frozen(kw_only=True)
class GatewaySettings:
    """Section `[gateway]`: the proxy that records the calls of agents which run outside the runner's process."""

    use: str = setting(
        "auto",
        help="whether agents call the model through the gateway; auto: if the agent's spec says calls=gateway, "
        "or if there are models",
        choices=("auto", "on", "off"),
    )
    host: str = setting("127.0.0.1", help="address that the gateway listens on; 0.0.0.0 for agents of other machines")
    port: int = setting(0, help="port that the gateway listens on; 0 for a free one", ge=0, le=65535)
    sampling: bool = setting(
        True, help="whether the gateway adds the run's sampling fields that an agent's request lacks"
    )
    body_mb: int = setting(16, help="longest body of an agent's request, MiB", ge=1, le=1024)
    models: dict[str, Any] = setting(
        dict,
        help='the models that agents may name: NAME = "policy" for the run\'s, which is trained, or a table with '
        "base_url, model, api_key_env and api for one that is not",
        validator=_checked,
    )

    @property
    def named(self) -> dict[str, FixedModel | None]:
        """The fixed model of each name; None for the run's."""
        return models_of(self.models)
