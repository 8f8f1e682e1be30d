"""Checks before the first rollout that an update fits into the device's memory, or refuses it with a message."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch  # noqa: TID253  (imported with the algorithm only)

from agentrig.errors import ConfigError
from agentrig.forest.scoring import CHUNK
from agentrig.hardware.memory import ModelShape
from agentrig_grpo.config import LearnerConfig
from agentrig_grpo.learner import GPU_CHUNK
from agentrig_grpo.memory import Need, in_gib, need_of

log = logging.getLogger(__name__)

MARGIN = 1.1
"""Factor over the estimate that must be free: for fragmentation and the workspaces of libraries."""

SERVER_SHARE = 0.4
"""Share of an accelerator's memory that is left to the model's server while it is awake: what vLLM takes by default,
and more than `embedded` does."""

LEAST = 256
"""Fewest tokens of a pass that a message recommends."""


@attrs.frozen(kw_only=True)
class MemoryPlan:
    """Settings with which an update fits.

    Attributes:
        config: The settings, with `gradient_checkpointing` on or off.
        chunk: Most logits at once.
        recomputed: With gradient checkpointing: how many layers compute their activations twice; None for all.
        need: The memory; None where a rough upper bound fits, or where it is not known.
    """

    config: LearnerConfig
    chunk: int
    recomputed: int | None = None
    need: Need | None = None


def plan_memory(directory: Path, config: LearnerConfig, *, dtype: str, device: str, attention: str) -> MemoryPlan:
    """Choose gradient checkpointing and the chunks of logits so that an update fits into a device's free memory.

    With `gradient_checkpointing = "auto"` only as many layers compute their activations twice as have to.

    Memory for the model's server is left, which may have started, or not: its share of an accelerator, or its weights
    alone, if it sleeps during updates or is on a CPU.

    Args:
        directory: The model's directory.
        config: Settings.
        dtype: The learner's dtype.
        device: torch's name of the device.
        attention: The attention, as in `load_model`.

    Raises:
        ConfigError: It does not fit; names a setting with which it does.
    """
    server = _weight_bytes(directory, dtype)
    if torch.device(device).type != "cpu" and not config.server_sleep:
        server += int(total_memory(device) * SERVER_SHARE)
    left = _left(device, server, asleep=config.server_sleep)
    big = CHUNK if torch.device(device).type == "cpu" else GPU_CHUNK
    ways = [False, True] if config.gradient_checkpointing == "auto" else [config.gradient_checkpointing]
    if _roughly(directory, config) * 2 < left:
        return MemoryPlan(config=attrs.evolve(config, gradient_checkpointing=ways[0]), chunk=big)

    def need(chunk: int = CHUNK, recomputed: int | None = None, **changes: Any) -> Need:
        changed = attrs.evolve(config, **changes)
        more: dict[str, Any] = {"dtype": dtype, "device": device, "attention": attention, "chunk": chunk}
        return need_of(directory, changed, recomputed=recomputed, **more)

    def fit(found: Need, chunk: int, *, checkpointing: bool, recomputed: int | None = None) -> MemoryPlan:
        layers = "off" if not checkpointing else "on" if recomputed is None else f"on for {recomputed} layers"
        log.info(
            "an update needs about %s of the %s that are free: %s; gradient checkpointing is %s",
            *(in_gib(found.peak), in_gib(left), found.describe(), layers),
        )
        chosen = attrs.evolve(config, gradient_checkpointing=checkpointing)
        return MemoryPlan(config=chosen, chunk=chunk, recomputed=recomputed, need=found)

    try:
        tried: dict[int, Need] = {}  # chunk to the memory without checkpointing
        for checkpointing in ways:
            for chunk in sorted({big, CHUNK}, reverse=True):
                found = need(chunk, gradient_checkpointing=checkpointing)
                if found.peak * MARGIN > left:
                    tried[chunk] = found
                    continue
                if not checkpointing or len(ways) == 1:
                    return fit(found, chunk, checkpointing=checkpointing)
                some = partial(need, chunk, gradient_checkpointing=True)
                recomputed, less = _fewest_layers(directory, tried[chunk], found, left, some)
                return fit(less, chunk, checkpointing=True, recomputed=recomputed)
    except Exception as error:  # the estimate, not the update, has failed: the run can go on without it
        log.warning(
            "how much memory an update needs is not known before the first one: %s. Gradient checkpointing is %s",
            *(f"{type(error).__name__}: {error}", "on" if ways[0] else "off"),
        )
        return MemoryPlan(config=attrs.evolve(config, gradient_checkpointing=ways[0]), chunk=CHUNK)
    raise ConfigError(_refusal(config, found, left, device, f"; its server takes {in_gib(server)}", need))


def _fewest_layers(
    directory: Path, without: Need, found: Need, left: int, need: Callable[[int], Need]
) -> tuple[int | None, Need]:
    """Return how few layers have to compute their activations twice, and the memory then; None for all of them.

    Args:
        directory: The model's directory.
        without: The memory without checkpointing, which is too much.
        found: The memory with all layers checkpointed, which fits.
        left: The free memory.
        need: The memory with so many layers checkpointed.
    """
    shape = _shape(directory)
    if shape is None:
        return None, found
    a_layer = (without.peak - found.peak) / shape.layers
    layers = math.ceil((without.peak - left / MARGIN) / max(a_layer, 1.0))
    while layers < shape.layers:  # the estimate is close to linear: once or twice
        some = need(layers)
        if some.peak * MARGIN <= left:
            return layers, some
        layers += max(1, math.ceil((some.peak - left / MARGIN) / max(a_layer, 1.0)))
    return None, found


def check_left(plan: MemoryPlan, device: str) -> None:
    """Check, when the learner and its server are there, that the memory left is enough for the rest of an update.

    Raises:
        ConfigError: It is not; says what to set.
    """
    kind = torch.device(device).type
    if (
        plan.need is None or plan.config.server_sleep or kind == "cpu"
    ):  # other processes share a CPU's memory, which was checked a moment ago
        return
    rest, left = plan.need.peak - plan.need.weights, free_memory(device)
    if rest > left:
        raise ConfigError(
            f"with its server started, {device} has {in_gib(left)} free, and an update needs {in_gib(rest)} more: "
            f"{plan.need.describe()}, with tokens_per_batch = {plan.config.tokens_per_batch}.\n  Give the server less "
            "memory in [server], set algorithm.server_sleep = true, or lower algorithm.tokens_per_batch"
        )


def free_memory(device: str) -> int:
    """Return the bytes that are free on a device; on a CPU, those that this process can still get."""
    kind = torch.device(device).type
    if kind != "cpu":
        return int(torch.get_device_module(kind).mem_get_info()[0])
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    try:
        group = Path("/sys/fs/cgroup")
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return free
    return min(free, int(limit) - int(used)) if limit.isdigit() else free


def total_memory(device: str) -> int:
    """Return the bytes of an accelerator's memory."""
    return int(torch.get_device_module(torch.device(device).type).mem_get_info()[1])


def _left(device: str, server: int, *, asleep: bool) -> int:
    """Return the bytes that are left to the learner beside a server, some of whose memory may be in use already."""
    kind = torch.device(device).type
    if kind == "cpu":
        return max(free_memory(device) - server, 0)
    total = total_memory(device)
    own = int(torch.get_device_module(kind).memory_reserved())
    others = total - free_memory(device) - own
    return max(total - own - (server if asleep else max(server, others)), 0)


def _weight_bytes(directory: Path, dtype: str) -> int:
    """Return the bytes of a model's weights in a dtype."""
    files = [*directory.glob("*.safetensors"), *directory.glob("pytorch_model*.bin")]
    shape = _shape(directory)
    size = {"float32": 4, "bfloat16": 2}[dtype]
    return shape.parameters * size if shape else sum(file.stat().st_size for file in files)


def _roughly(directory: Path, config: LearnerConfig) -> float:
    """Return more bytes than an update needs without checkpointing, from the model's sizes; infinite if unknown."""
    shape = _shape(directory)
    if shape is None:
        return float("inf")
    a_token = shape.layers * (40 * shape.hidden + 12 * shape.intermediate) + 8 * shape.vocabulary
    return (24 + 4 * config.max_staleness) * shape.parameters + 4 * a_token * config.tokens_per_batch


def _shape(directory: Path) -> ModelShape | None:
    return ModelShape.from_config(json.loads((directory / "config.json").read_text("utf-8")))


def _refusal(config: LearnerConfig, found: Need, left: int, device: str, server: str, need: Callable[..., Need]) -> str:
    """Return why an update does not fit, and what to set so that it does."""
    what = (
        f"an update needs about {in_gib(found.peak * MARGIN)} of memory, and {in_gib(left)} of {device} are free for it"
        f"{server}: {found.describe()}, with tokens_per_batch = {config.tokens_per_batch}.\n  "
    )

    def fits(**changes: Any) -> bool:
        return need(**changes).peak * MARGIN <= left

    if config.gradient_checkpointing is False and fits(gradient_checkpointing=True):
        return f"{what}Set algorithm.gradient_checkpointing = true"
    to_save = {"gradient_checkpointing": config.gradient_checkpointing is not False}
    tokens, state = config.tokens_per_batch, found.peak - max(found.activations, found.change)
    while (state + found.change) * MARGIN < left and (tokens := tokens // 2) >= LEAST:
        if fits(tokens_per_batch=tokens, **to_save):
            return f"{what}Set algorithm.tokens_per_batch = {tokens}"
    if not config.lora_rank and config.optimizer == "adamw" and fits(optimizer="adamw8bit", **to_save):
        return f"{what}Set algorithm.optimizer = \"adamw8bit\" (pip install 'agentrig-grpo[8bit]')"
    if not config.lora_rank and fits(lora_rank=16, gradient_checkpointing=True):
        return f"{what}Set algorithm.lora_rank = 16, which trains adapters only"
    return f"{what}Take a smaller model, or a device with more memory"
