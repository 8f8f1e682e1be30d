"""Ray: joins or starts a cluster with what its workers need. A stale one is reported; --yes stops it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from agentrig_ray.cluster import reach, refused

from agentrig.errors import ConfigError
from agentrig.hardware import Hardware, installed
from agentrig_verl import modelscope
from agentrig_verl.ray_checks import NEEDED_BY_WORKERS, address_file, ray_processes
from agentrig_verl.workers import ray_environment

log = logging.getLogger(__name__)

PASSED = (
    *("HF_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", *modelscope.PASSED),
    *("VLLM_NO_USAGE_STATS", "PYTHONPATH", "LANGSMITH_TRACING"),
)
"""Passed on to the workers of a cluster that was started elsewhere."""

DEAD = "If it is dead: run `ray stop`, unset RAY_ADDRESS or delete /tmp/ray/ray_current_cluster, and try again"
"""What to do about a cluster that does not answer."""

STOP = [sys.executable, "-P", "-m", "ray.scripts.scripts", "stop"]
"""`ray stop` of this environment, which may not be on PATH."""


def connect(config: Any, hardware: Hardware, *, logs: bool = False) -> int:
    """Join the running Ray cluster, or start one on this machine; return the number of nodes.

    Args:
        hardware: The hardware whose environment and setup function the workers get.

    Raises:
        ConfigError: The cluster cannot be used for this run; says what it lacks and what to do.
    """
    import ray
    from omegaconf import OmegaConf
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    if ray.is_initialized():
        return _nodes(ray)
    runtime = ray_environment(
        hardware, installed(("verl", "vllm", "torch", "torch_npu")), get_ppo_ray_runtime_env(config)
    )
    variables = runtime.setdefault("env_vars", {})
    variables["TRANSFER_QUEUE_ENABLE"] = "1"
    for name in PASSED:
        if os.environ.get(name):
            variables.setdefault(name, os.environ[name])
    given: dict[str, Any] = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)
    own = {k: v for k, v in (given.pop("runtime_env", None) or {}).items() if v is not None}
    own_variables = own.pop("env_vars", {})
    runtime = {**runtime, **own, "env_vars": {**variables, **own_variables}}
    running = running_cluster()
    if running and given.get("address") is None:
        given["address"] = running
    left_over = given.get("address") == running and not os.environ.get("RAY_ADDRESS")  # not named by the user
    if given.get("address"):
        given.pop("num_cpus", None)  # Ray accepts it only when it starts the cluster
        reach(given["address"], DEAD)
        if left_over:
            given["address"] = "auto"  # the same cluster; Ray sends no token to an explicit address by default
    try:
        ray.init(**given, runtime_env=runtime, log_to_driver=logs, configure_logging=False)
    except ConnectionError as error:
        raise refused(str(running or given.get("address")), error, DEAD) from error
    if given.get("address"):
        lacking = lacks(ray, [name for name in NEEDED_BY_WORKERS if os.environ.get(name)])
        short = _short(ray, config, hardware)
        if lacking or short:
            ray.shutdown()
            if os.environ.get("AGENTRIG_YES") == "1" and left_over:
                log.warning("stopping the Ray cluster %s: %s", running, "; ".join([*lacking, *short]))
                subprocess.run(STOP, check=True, capture_output=True)
                return connect(config, hardware, logs=logs)
            raise ConfigError(_explain(running or given["address"], lacking, short, stoppable=left_over))
        log.info("joined the Ray cluster %s: %d nodes", running or given["address"], _nodes(ray))
    return _nodes(ray)


def running_cluster() -> str | None:
    """Return the address of a cluster to join: `RAY_ADDRESS`, else the one started on this machine.

    The address file of a cluster without processes is deleted.
    """
    if os.environ.get("RAY_ADDRESS"):
        return os.environ["RAY_ADDRESS"]
    noted = address_file(os.environ)
    if not noted.exists():
        return None
    address = noted.read_text("utf-8").strip()
    if ray_processes():
        return address
    log.info("%s names a Ray cluster (%s) that no longer runs; starting a new one", noted, address)
    noted.unlink()
    return None


def lacks(ray: Any, names: Sequence[str]) -> list[str]:
    """Return what the workers of a cluster lack, one line per node that lacks something."""
    if not names:
        return []

    def look(wanted: Sequence[str]) -> list[str]:
        return [name for name in wanted if not os.environ.get(name)]

    remote = ray.remote(num_cpus=0)(look)
    affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    found = []
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        placed = remote.options(scheduling_strategy=affinity(node["NodeID"], soft=False))
        missing = ray.get(placed.remote(list(names)))
        if missing:
            found.append(f"node {node['NodeManagerAddress']} has no {', '.join(missing)}")
    return found


def _short(ray: Any, config: Any, hardware: Hardware) -> list[str]:
    """Return which resources the cluster has too few of."""
    wanted = config.trainer.nnodes * config.trainer.n_gpus_per_node
    name = hardware.ray_resource
    there = ray.cluster_resources().get(name, 0)
    if name != "CPU" and there < wanted:
        return [f"it has {there:g} {name}, and the run needs {wanted}"]
    return []


def _explain(address: str, lacking: Sequence[str], short: Sequence[str], *, stoppable: bool) -> str:
    lines = [
        f"the running Ray cluster {address} cannot be used for this run:",
        *(f"  {x}" for x in (*lacking, *short)),
    ]
    if lacking:
        lines.append("  (these variables are set here, but the cluster was started without them)")
    if stoppable:
        lines.append(
            "  If it is left over: `ray stop` and start it again from this shell, or pass --yes, which stops every Ray "
            "process of yours on this machine. If others use it: ask them."
        )
    else:
        lines.append("  RAY_ADDRESS, or ray_init.address, names it: start it again with what it lacks, or name another")
    return "\n".join(lines)


def _nodes(ray: Any) -> int:
    return sum(bool(node["Alive"]) for node in ray.nodes())
