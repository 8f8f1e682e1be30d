"""The server `timed-server`: agentrig's embedded server, which records how long each transfer of weights takes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import attrs
from agentrig_grpo.config import EmbeddedConfig

from agentrig import Endpoint, ServerSpec, hookimpl, setting
from agentrig.servers import ServerPlan

if TYPE_CHECKING:
    import torch

    from agentrig.servers import MakeServer


@attrs.frozen(kw_only=True)
class Config:
    """The settings: `[server]` of a run file."""

    threads: int = setting(1, help="torch threads of the server", ge=1)


class TimedServer:
    """Implements `agentrig.servers.Server`, whose docstrings say what each method must do.

    To serve by an engine of your own, replace the inner server method by method.
    """

    def __init__(self, config: Config, plan: ServerPlan) -> None:
        from agentrig_grpo.server.handle import Embedded

        self._inner = Embedded(EmbeddedConfig(threads=config.threads), plan)
        self._log = plan.log
        self.dtype = plan.dtype

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        """The addresses; every one answers when this returns."""
        return self._inner.endpoints

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return self._inner.context

    def __enter__(self) -> TimedServer:
        """Start."""
        self._inner.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all processes of the server."""
        self._inner.__exit__(kind, error, trace)

    def take(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Compute with new weights from now on, and add a line to `transfers.jsonl` beside the server's log."""
        start = time.perf_counter()
        self._inner.take(weights, version)
        line: dict[str, Any] = {"version": version, "seconds": round(time.perf_counter() - start, 4)}
        if self._log is not None:
            with (self._log.parent / "transfers.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def held(self) -> Sequence[Mapping[str, str]] | None:
        """Return the digests of the tensors that the server computes with; None if its answers have them."""
        return self._inner.held()

    def sleep(self) -> None:
        """Give the device's memory to the learner."""
        self._inner.sleep()

    def wake(self) -> None:
        """Take the memory back."""
        self._inner.wake()

    def check(self) -> None:
        """Raise `ServerError` if the server has died."""
        self._inner.check()


def build(config: Config) -> MakeServer:
    """Return what makes the server of a plan."""
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
