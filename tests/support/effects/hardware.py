"""The keys of hardware, observed in torch's threads, in environments, and in loaded models."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from agentrig_forest.attention import NAME
from agentrig_forest.scoring import prepare
from agentrig_grpo import checkpoint
from agentrig_grpo.algorithm import Grpo
from agentrig_grpo.naming import model_directory
from agentrig_verl.keys import keys_of
from agentrig_verl.schema import MODEL
from agentrig_verl.workers import ray_environment

from agentrig.hardware.memory import GIB, DeviceMemory
from effects import Flip, Settings, config_of, exact
from effects.tasks import build


def threads(settings: Settings) -> tuple[int, str]:
    """Return torch's threads after an algorithm has made its learner, and the environment of child processes."""
    before = torch.get_num_threads()
    hardware = build("hardware.cpu", settings)
    try:
        session = SimpleNamespace(
            hardware=hardware, seed=0, train_tasks=[], note=lambda text: None, record=lambda *_: None
        )
        Grpo(config_of("algorithm.grpo", {})).learner(session)
        return torch.get_num_threads(), hardware.environment()["OMP_NUM_THREADS"]
    finally:
        torch.set_num_threads(before)


def attention(settings: Settings) -> tuple[str, str]:
    """Return the attention that verl is given, and the one that the learner of `grpo` computes with."""
    hardware = build("hardware.cuda", settings)
    key = f"{MODEL}.override_config.attn_implementation"
    model = checkpoint.load_model(model_directory("mini"), attention=checkpoint.attention_of(hardware))
    prepare(model)  # as the learner does: it may replace what the model was loaded with
    return keys_of(config_of("algorithm.verl", {}), hardware, plan=None).get(key, ""), model.config._attn_implementation


def ports(settings: Settings) -> Mapping[str, Any]:
    """Return HCCL's ports for the workers of a Ray job."""
    variables = ray_environment(build("hardware.ascend", settings), {"verl": "0.9.1"})["env_vars"]
    return {name: variables.get(name) for name in ("HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE")}


def budget(name: str, settings: Settings) -> float:
    """Return what the memory plan of a device of 80 GiB gives to server and learner together."""
    limit = build(f"hardware.{name}", settings).memory_limit
    return DeviceMemory(name="cuda", total=80 * GIB, limit=limit).budget / GIB


TABLES = {
    "hardware.cpu": {"threads": exact(1, 3, threads, ((1, "1"), (3, "3")))},
    "hardware.cuda": {
        "attention": exact("sdpa", "eager", attention, (("sdpa", NAME), ("eager", "eager"))),
        "memory_gib": exact(0, 24, lambda s: budget("cuda", s), (80.0, 23.25)),
    },
    "hardware.ascend": {
        "memory_gib": exact(0, 24, lambda s: budget("ascend", s), (80.0, 23.25)),
        "socket_ports": Flip(
            a="60000-60050",
            b="61000-61050",
            look=ports,
            shows=lambda a, b: set(a.values()) == {"60000-60050"} and set(b.values()) == {"61000-61050"},
        ),
        "ray_keeps_visibility": exact(
            False,
            True,
            lambda s: ray_environment(build("hardware.ascend", s), {"verl": "0.9.1"})["env_vars"].get(
                "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"
            ),
            (None, "1"),
        ),
    },
}
