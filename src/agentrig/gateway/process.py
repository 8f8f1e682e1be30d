"""The gateway of a run, in a process of its own: started, ended, and asked to close what killed runners left open."""

from __future__ import annotations

import json
import logging
import secrets
import socket
import sys
from types import TracebackType
from typing import Any

import attrs

from agentrig.endpoints import GatewayAddress, is_loopback
from agentrig.gateway.client import GatewayError, Visit
from agentrig.gateway.settings import GatewaySettings
from agentrig.processes.servers import ServerError, ServerProcess
from agentrig.text import mask
from agentrig.traces import Trace

log = logging.getLogger(__name__)

ANY_HOST = ("", "0.0.0.0", "::")
START_S = 60.0
"""Seconds until it must answer."""


class Gateway:
    """A running gateway; a context manager that starts and ends it.

    Attributes:
        address: Where it is, once it is started.

    Args:
        settings: Section `[gateway]`.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._process: ServerProcess | None = None
        self._line: socket.socket | None = None
        self._token = secrets.token_urlsafe(32)
        self.address = GatewayAddress("", self._token)
        mask(self._token, "<the gateway's token>")

    def __enter__(self) -> Gateway:
        """Start it.

        Raises:
            ServerError: It can't listen there, or died.
        """
        ours, theirs = socket.socketpair()
        # -P: never import modules from the current folder.
        command = [sys.executable, "-P", "-m", "agentrig.gateway", str(theirs.fileno())]
        self._line = ours
        self._process = ServerProcess("the gateway", command, descriptors=[theirs.fileno()])
        theirs.close()
        try:
            port = self._start(ours)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        host = socket.gethostname() if self._settings.host in ANY_HOST else self._settings.host
        self.address = GatewayAddress(f"http://{f'[{host}]' if ':' in host else host}:{port}", self._token)
        if not is_loopback(host):
            log.warning(
                "the gateway listens on %s: a person with the key of a rollout can call the model as that rollout "
                "while it runs, and the connection is not encrypted. Use a private network or a tunnel",
                self._settings.host,
            )
        return self

    def _start(self, line: socket.socket) -> int:
        assert self._process is not None
        where = f"{self._settings.host}:{self._settings.port} (gateway.host, gateway.port)"
        sent = {"token": self._token, "host": self._settings.host, "port": self._settings.port}
        sent |= {"sampling": self._settings.sampling, "body_mb": self._settings.body_mb, "models": self._models()}
        sent["own"] = [name for name, model in self._settings.named.items() if model and model.api == "own"]
        line.settimeout(START_S)
        try:
            line.sendall(json.dumps(sent).encode() + b"\n")
            with line.makefile("rb") as lines:
                answer: dict[str, Any] = json.loads(lines.readline() or b"{}")
        except TimeoutError:
            raise ServerError(f"the gateway did not start within {START_S:g} s{self._process.tail()}") from None
        except OSError:
            answer = {}
        if "error" in answer:
            raise ServerError(f"the gateway cannot listen on {where}: {answer['error']}")
        if "port" not in answer:
            self._process.wait(5)
            self._process.check()
            raise ServerError(f"the gateway did not start{self._process.tail()}")
        return int(answer["port"])

    def _models(self) -> dict[str, dict[str, Any] | None]:
        """Return the endpoint of each fixed model by name, with its key; None for the run's model."""
        named = self._settings.named
        return {n: None if model is None else attrs.asdict(model.endpoint(n)) for n, model in named.items()}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it; calls under way break."""
        if self._process is not None:
            self._process.stop()
        if self._line is not None:
            self._line.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid if self._process is not None else 0

    def check(self) -> None:
        """Raise `ServerError` if it has died."""
        if self._process is not None:
            self._process.check()

    def left(self, rollout: str) -> Trace | None:
        """Close a rollout whose runner could not, and return its trace; None if nothing of it is open.

        Raises:
            ServerError: The gateway has died.
        """
        try:
            found = Visit(self.address, rollout).close()
        except GatewayError:
            self.check()
            return None
        return found.trace(rollout)
