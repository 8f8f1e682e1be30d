"""The server `timed-server`: agentrig's embedded server, which records how long each transfer of weights takes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
from agentrig_grpo.config import EmbeddedConfig

from agentrig import ServerSpec, hookimpl, setting

if TYPE_CHECKING:
    from agentrig.servers import MakeServer


@attrs.frozen(kw_only=True)
class Config(EmbeddedConfig):
    """The settings: `[server]` of a run file; those of the embedded server, and one more."""

    file: str = setting("transfers.jsonl", help="the file with the times, beside the server's log")


def build(config: Config) -> MakeServer:
    """Return what makes the server of a plan; what a server promises is in `agentrig.servers.Server`."""
    from agentrig_grpo.server.handle import Embedded

    class TimedServer(Embedded):
        """Adds a line to the file at each transfer. To serve by an engine of your own, write the methods yourself."""

        def take(self, weights: Any, version: int, **more: Any) -> None:
            start = time.perf_counter()
            super().take(weights, version, **more)
            line = {"version": version, "seconds": round(time.perf_counter() - start, 4)}
            if self._log is not None:
                with self._log.with_name(config.file).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")

    return partial(TimedServer, config)


@hookimpl
def register_servers() -> Iterable[ServerSpec]:
    """Register `timed-server`; without a rank, `auto` never selects it."""
    yield ServerSpec(
        name="timed-server",
        summary="The embedded server; records how long each transfer of weights takes.",
        config=Config,
        build=build,
    )
