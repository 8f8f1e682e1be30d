"""Section `[gateway]` of a run."""

from __future__ import annotations

import attrs

from agentrig.settings import setting


@attrs.frozen(kw_only=True)
class GatewaySettings:
    """Section `[gateway]`: the proxy that records the calls of agents which run outside the runner's process."""

    use: str = setting(
        "auto",
        help="whether agents call the model through the gateway; auto: if the agent's spec says calls=gateway",
        choices=("auto", "on", "off"),
    )
    host: str = setting("127.0.0.1", help="address that the gateway listens on; 0.0.0.0 for agents of other machines")
    port: int = setting(0, help="port that the gateway listens on; 0 for a free one", ge=0, le=65535)
    sampling: bool = setting(
        True, help="whether the gateway adds the run's sampling fields that an agent's request lacks"
    )
    body_mb: int = setting(16, help="longest body of an agent's request, MiB", ge=1, le=1024)
