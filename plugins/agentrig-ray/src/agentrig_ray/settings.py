"""The keys of the runners `ray`."""

from __future__ import annotations

from typing import Any

import attrs

from agentrig import setting
from agentrig.pools import RunnerSettings


@attrs.frozen(kw_only=True)
class RayRunners(RunnerSettings):
    """Settings of `ray`, beside those of all runners."""

    address: str = setting(
        "",
        help="HOST:PORT of the cluster; empty: RAY_ADDRESS, or the one that runs here; local: a new one here",
    )
    cpus: float = setting(0.5, help="CPUs that a runner requests from Ray", ge=0)
    resources: dict[str, float] = setting(
        dict, help="custom resources that a runner requests, to keep runners on some nodes: resources.runner=1"
    )
    runtime_env: dict[str, Any] = setting(
        dict, help="Ray's runtime_env of the runners (pip, container, …); Ray's dashboard shows it: no secrets"
    )
    wait_s: float = setting(
        300.0, help="seconds until one runner must have a place and its agent; a cluster that grows takes minutes", gt=0
    )
    logs: bool = setting(False, help="print what the runners print")
