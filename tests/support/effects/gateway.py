"""The keys of `[gateway]`, observed in real gateway processes."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import httpx

from agentrig.gateway.client import GatewayAttempt
from agentrig.gateway.process import Gateway
from agentrig.gateway.settings import GatewaySettings
from agentrig.plan import resolve
from agentrig.testing.scripted import scripted_server
from effects import Settings, Together, exact, free_port
from effects.run import TOY


def seen(settings: Settings) -> dict[str, Any]:
    """Return where a gateway listens, and what it does with a short and a long request."""
    with scripted_server() as model, Gateway(GatewaySettings(**settings)) as gateway:
        endpoint = GatewayAttempt(gateway.address, "r").open(1, model.endpoint(temperature=0.7))
        statuses = []
        for letters in (1, 3 << 19):
            body = {"model": endpoint.model, "messages": [{"role": "user", "content": "x" * letters}]}
            headers = {"authorization": f"Bearer {endpoint.api_key}"}
            reply = httpx.post(f"{endpoint.base_url}/chat/completions", json=body, headers=headers, timeout=60)
            statuses.append(reply.status_code)
        where = urlsplit(gateway.address.url)
        return {"host": where.hostname, "port": where.port, "statuses": statuses, "sent": model.bodies()[0]}


BOTH, PORT = Together(seen), free_port("127.0.0.2")
TABLE = {
    "use": exact(
        "off",
        "on",
        lambda settings: resolve("toy", overrides=[f"gateway.use={settings['use']}"], files=[TOY]).uses_gateway,
        (False, True),
    ),
    "host": BOTH.exact("host", "127.0.0.1", "127.0.0.2", lambda s: s["host"]),
    "port": BOTH.flip("port", 0, PORT, lambda s: s["port"], lambda a, b: a != PORT and b == PORT),
    "sampling": BOTH.exact("sampling", True, False, lambda s: s["sent"].get("temperature"), (0.7, None)),
    "body_mb": BOTH.exact("body_mb", 1, 2, lambda s: s["statuses"], ([200, 413], [200, 200])),
}
