"""The runners `ray`: agents as actors of a Ray cluster, under any algorithm."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from agentrig import RunnersSpec, hookimpl


def _build(config: Any) -> Any:
    from agentrig_ray.pool import RayPool

    own = {name: getattr(config, name) for name in ("address", "cpus", "resources", "runtime_env", "wait_s", "logs")}
    return partial(RayPool, **own)


@hookimpl
def register_runners() -> Iterable[RunnersSpec]:
    """Register `ray`."""
    from agentrig_ray.settings import RayRunners

    yield RunnersSpec(
        name="ray", summary="Actors of a Ray cluster, on every node that has room.", config=RayRunners, build=_build
    )
