"""The optimizers that a learner can have, and what their state means."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch  # noqa: TID253  (imported with the learner only)

from agentrig.errors import AgentrigError, ConfigError
from agentrig_grpo.config import LearnerConfig
from agentrig_grpo.host_moments import MOMENTS, HostAdamW

BLOCK = 256
"""Elements of an 8-bit moment that have one scale."""

SMALL = 4096
"""Tensors with fewer elements have moments in fp32, also in the 8-bit optimizer."""


def optimizer_of(parameters: Iterable[torch.nn.Parameter], config: LearnerConfig) -> torch.optim.Optimizer:
    """Return the optimizer that the settings ask for: AdamW in fp32 (torch), or in 8 bits (bitsandbytes).

    Moments on the device are made here. Made by the first step, they would lie between that update's activations and
    gradients, and torch could not give back the memory around them.
    """
    settings: Any = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "weight_decay": config.weight_decay,
    }
    if config.moments == "host":
        return HostAdamW(parameters, **settings)
    if config.optimizer == "adamw":
        plain = torch.optim.AdamW(parameters, **settings, fused=True)
        for parameter in (p for group in plain.param_groups for p in group["params"]):
            plain.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                **{name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in MOMENTS},
            }
        return plain
    try:
        library: Any = importlib.import_module("bitsandbytes.optim")
    except ImportError as error:
        raise ConfigError(
            f'[algorithm] optimizer = "{config.optimizer}" needs bitsandbytes ({error}):\n'
            "  pip install 'agentrig-grpo[8bit]'"
        ) from error
    made: Any = library.AdamW8bit(parameters, **settings, min_8bit_size=SMALL)
    for number, group in enumerate(made.param_groups):
        for place, parameter in enumerate(group["params"]):
            made.init_state(group, parameter, number, place)
    found: torch.optim.Optimizer = made
    return found


def learning_rate(config: LearnerConfig, *, step: int, update: int) -> float:
    """Return the learning rate of an update; `step`, of the run, and `update`, of the optimizer, count from 1."""
    rate = config.lr * min(1.0, update / max(config.warmup_steps, 1))
    if config.lr_scheduler_type == "linear":
        rate *= min(1.0, max(1, config.steps - step + 1) / config.steps)
    return rate


def optimizer_bytes(tensors: Sequence[torch.Tensor], name: str) -> int:
    """Return the bytes that an optimizer has on the device for its moments of some tensors in fp32."""
    if name == "adamw":
        return sum(8 * t.numel() for t in tensors)
    # One byte for each of two moments, a scale for each block of them, and a table of 256 values a tensor.
    return sum(
        8 * t.numel() if t.numel() < SMALL else 2 * (t.numel() + 4 * -(-t.numel() // BLOCK) + 1024) for t in tensors
    )


def check_state(state: Mapping[str, Any], config: LearnerConfig) -> None:
    """Check that a checkpoint's optimizer is the one of the settings."""
    kinds = {"adamw" if "exp_avg" in one else "adamw8bit" for one in state["state"].values()}
    if kinds - {config.optimizer}:
        raise AgentrigError(
            f'the checkpoint was written with algorithm.optimizer = "{kinds.pop()}", and this run has '
            f'"{config.optimizer}": resume with the one that the run started with'
        )
