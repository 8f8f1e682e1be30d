"""The doctor's check of the memory plan: what a run would choose on this device, or on one of `hardware.memory_gib`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from agentrig.errors import ConfigError
from agentrig.findings import Finding, Situation
from agentrig.hardware.memory import PASSES, DeviceMemory, ModelShape
from agentrig.servers import ServerMemory
from agentrig_grpo.config import LearnerConfig
from agentrig_grpo.fitting import Fitting, Need, checkpoint_bytes, group_length, passes_of, proof_bytes, server_need
from agentrig_grpo.naming import model_directory
from agentrig_grpo.planning import context_of_model, lends, shape_of, size_of

LOGITS = 3 << 30
"""Bytes that the logits of a pass take, with their gradient, on a large device."""


def check_memory_plan(situation: Situation) -> Iterator[Finding]:
    """What would a run choose, so that server and learner fit into the device together?"""
    plan, hardware = situation.plan, situation.hardware
    if plan is None or hardware is None or hardware.torch_device == "cpu":
        return
    config, limit = plan.configs["algorithm"], hardware.memory_limit
    sizes = [device.memory for device in situation.probes[hardware.name].devices if device.memory]
    if not sizes and not limit:
        why = f"{hardware.name} does not say its memory; hardware.memory_gib=24 computes for a device of 24 GiB"
        yield Finding.skipped("memory plan", why)
        return
    try:
        directory = model_directory(config.model)
        shape, device = (
            shape_of(directory),
            DeviceMemory(name=hardware.torch_device, total=min(sizes or [limit]), limit=limit),
        )
        if shape is None:
            yield Finding.skipped("memory plan", f"the shape of {config.model} is not known")
            return
        memory = getattr(plan.components["server"].spec, "memory", None)
        says = memory(plan.configs["server"]) if memory else ServerMemory(sequences=64)
        fitting = fitting_about(
            shape,
            config,
            device,
            says,
            lends=lends(directory, config, dtype_about(config), says),
            context=context_of_model(directory, config),
            runners=plan.runners.n * plan.runners.threads,
        )
        yield Finding.ok("memory plan", f"about: {fitting.describe(fitting.choose())}")
    except ConfigError as error:
        yield Finding.of_error("memory plan", error)


def fitting_about(
    shape: ModelShape,
    config: LearnerConfig,
    device: DeviceMemory,
    says: ServerMemory,
    *,
    context: int,
    runners: int,
    lends: bool = True,
) -> Fitting:
    """Return about what server and learner need of a device, from sizes alone.

    Args:
        context: Most tokens that the server takes.
        runners: Rollouts that run at once at most.
        lends: Whether the learner can compute with the server's weights, as far as the model is concerned.
    """
    element, group = size_of(dtype_about(config)), group_length(config, context)
    server = server_need(
        config,
        says,
        shape,
        weights=shape.parameters * element,
        element=element,
        context=context,
        runners=runners,
        total=device.total,
        lends=lends,
    )
    return Fitting(
        config=config,
        device=device,
        server=server,
        estimate=cache(lambda asked, tokens, recomputed: about(shape, asked, tokens, recomputed, element)),
        passes=sorted({PASSES[-1], passes_of(config, device, group)[0]}),
        layers=shape.layers,
        group=group,
    )


def dtype_about(config: LearnerConfig) -> str:
    """Return the dtype that a run computes in on an accelerator."""
    return "float32" if config.dtype == "float32" else "bfloat16"


def about(shape: ModelShape, config: LearnerConfig, tokens: int, recomputed: int, element: int) -> Need:
    """Return about what an update needs, from the model's sizes alone: a run measures its code instead.

    Args:
        tokens: Tokens of a pass.
        recomputed: How many layers compute their activations twice.
        element: Bytes of a number that is computed with.
    """
    weights, trained = shape.parameters, trained_of(shape, config)
    copies = 0 if config.lora_rank or element == 4 else 2
    layer = tokens * (13 * shape.hidden + 4 * shape.intermediate) * element // 2
    kept = tokens * shape.hidden * element
    return Need(
        weights=weights * element + trained * (4 + element) if config.lora_rank else weights * (4 + copies),
        gradients=4 * trained,
        optimizer=moments_about(trained, config),
        activations=(shape.layers - recomputed) * layer + recomputed * kept + (layer if recomputed else 0) + LOGITS,
        change=4 * trained,
        earlier=(copies or 4) * trained if config.max_staleness else 0,
        proof=proof_bytes(shape.vocabulary, shape.hidden, frozen=bool(config.lora_rank) and element == 2),
        frozen=weights * element if config.lora_rank else 0,
    )


def trained_of(shape: ModelShape, config: LearnerConfig) -> int:
    """Return how many weights are trained."""
    return shape.adapters(config.lora_rank) if config.lora_rank else shape.parameters


def moments_about(trained: int, config: LearnerConfig) -> int:
    """Return about how many bytes the optimizer's moments have."""
    return trained * (2 if config.optimizer == "adamw8bit" else 8)


def checkpoint_about(shape: ModelShape, config: LearnerConfig) -> int:
    """Return about how many bytes a checkpoint has, from the model's sizes alone."""
    trained, model = trained_of(shape, config), shape.parameters * size_of(dtype_about(config))
    return checkpoint_bytes(config, trained=trained, moments=moments_about(trained, config), model=model)
