"""The gateway of a run, in a process of its own: started, ended, and asked to close what killed runners left open."""

from __future__ import annotations

import logging
import secrets
import sys
from types import TracebackType

import attrs

from agentrig.endpoints import GatewayAddress, address_of, is_loopback
from agentrig.gateway.client import GatewayAttempt, GatewayError
from agentrig.gateway.settings import GatewaySettings
from agentrig.processes.servers import ServerProcess
from agentrig.text import mask
from agentrig.traces import Trace

log = logging.getLogger(__name__)

START_S = 60.0
"""Seconds until it must answer."""


class Gateway:
    """A running gateway; a context manager that starts and ends it.

    Attributes:
        address: Where it is, once it is started.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._process: ServerProcess  # once it is started
        self.address = GatewayAddress("", secrets.token_urlsafe(32))
        mask(self.address.token, "<the gateway's token>")

    def __enter__(self) -> Gateway:
        """Start it."""
        # -P: never import modules from the current folder.
        command = [sys.executable, "-P", "-m", "agentrig.gateway"]
        named, token = self._settings.named, self.address.token
        self._process = ServerProcess(
            "the gateway",
            command,
            first={
                "token": token,
                "host": self._settings.host,
                "port": self._settings.port,
                "sampling": self._settings.sampling,
                "body_mb": self._settings.body_mb,
                # Each fixed model's endpoint by name, with its key; None for the run's model.
                "models": {n: None if m is None else attrs.asdict(m.endpoint(n)) for n, m in named.items()},
                "own": [name for name, model in named.items() if model and model.api == "own"],
            },
        )
        try:
            port = self._process.receive("start", START_S)["port"]
        except BaseException:
            self._process.stop()
            raise
        self.address = GatewayAddress(address_of(self._settings.host, port), token)
        if not is_loopback(self.address.url):
            log.warning(
                "the gateway listens on %s: a person with the key of a rollout can call the model as that rollout "
                "while it runs, and the connection is not encrypted. Use a private network or a tunnel",
                self._settings.host,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it; calls under way break."""
        self._process.stop()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def check(self) -> None:
        """Raise `ServerError` if it has died."""
        self._process.check()

    def left(self, rollout: str) -> Trace | None:
        """Close a rollout whose runner could not, and return its trace; None if nothing of it is open."""
        try:
            found = GatewayAttempt(self.address, rollout).close()
        except GatewayError:
            self.check()
            return None
        return found.trace(rollout)
