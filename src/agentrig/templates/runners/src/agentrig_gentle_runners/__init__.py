"""The runners `gentle-runners`: processes of this machine with a lower priority: you can go on working on it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

from agentrig import RunnersSpec, hookimpl, setting
from agentrig.pools import RunnerSettings

if TYPE_CHECKING:
    from agentrig.pools import AgentSource, MakePool


@attrs.frozen(kw_only=True)
class Config(RunnerSettings):
    """The settings: `[runners]` of a run file; those of all runners, and one more."""

    nice: int = setting(10, help="how much lower the priority of the runners is than that of the run", ge=0, le=19)


def build(config: Config) -> MakePool:
    """Return what makes the pool; what a pool promises is in the docstring of `agentrig.pools.RunnerPool`."""
    from agentrig.runners.processes import Pool

    class GentlePool(Pool):
        """Lowers the priority of each runner when it starts; its threads and children inherit it."""

        def __init__(self, plan: AgentSource, *, nice: int, **limits: Any) -> None:
            super().__init__(plan, **limits)
            self._priority = min(19, os.getpriority(os.PRIO_PROCESS, 0) + nice)

        def _spawn(self) -> Any:
            worker = super()._spawn()
            with suppress(ProcessLookupError):  # it has died already: the pool notices and starts another
                os.setpriority(os.PRIO_PROCESS, worker.process.pid, self._priority)
            return worker

    return partial(GentlePool, nice=config.nice)


@hookimpl
def register_runners() -> Iterable[RunnersSpec]:
    """Register `gentle-runners`."""
    yield RunnersSpec(name="gentle-runners", summary="Processes with a lower priority.", config=Config, build=build)
