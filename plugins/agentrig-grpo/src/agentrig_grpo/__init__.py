"""The algorithm `grpo`, group-relative policy optimization in torch, and the LLM server `embedded`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from agentrig import AlgorithmSpec, ServerSpec, hookimpl
from agentrig_grpo.config import EmbeddedConfig, GrpoConfig, SftConfig
from agentrig_grpo.config import LearnerConfig as LearnerConfig

if TYPE_CHECKING:
    from pathlib import Path

    from agentrig.algorithms import LoopAlgorithm
    from agentrig.demonstrations import StartingModel, StartPlan, Turn
    from agentrig.hardware.memory import Workload
    from agentrig.servers import MakeServer, ServerMemory


def build(config: LearnerConfig) -> LoopAlgorithm:
    """Return the algorithm."""
    from agentrig_grpo.algorithm import Grpo

    return Grpo(config)


def workload(config: LearnerConfig) -> Workload | None:
    """Say what training asks of the device, for the doctor; None when there is no such model."""
    from agentrig.errors import ConfigError
    from agentrig.hardware.memory import Workload
    from agentrig_grpo.checks import checkpoint_about
    from agentrig_grpo.naming import model_directory
    from agentrig_grpo.planning import shape_of

    try:
        model = model_directory(config.model)
    except ConfigError:
        return None
    context, shape = config.max_length or 4096, shape_of(model)
    return Workload(
        model=str(model),
        micro_batch=max(1, (8192 if config.tokens_per_batch == "auto" else config.tokens_per_batch) // context),
        context=context,
        trained=0.01 if config.lora_rank else 1.0,
        checkpoint=checkpoint_about(shape, config) if shape else 0,
    )


def ready(config: LearnerConfig) -> None:
    """Make sure that the starting model is there; one of the hub is downloaded."""
    from agentrig_grpo.naming import download, model_directory

    download(config.model)
    model_directory(config.model)


def make_start(config: LearnerConfig, plan: StartPlan, turns: Sequence[Turn]) -> StartingModel:
    """Choose a model for a warm-up; torch is imported here."""
    from agentrig_grpo import starting

    return starting.make_start(config, plan, turns)


def export(checkpoint: Path, target: Path) -> None:
    """Write a checkpoint of adapters as a plain model; torch is imported here."""
    from agentrig_grpo.adapter_files import write_plain
    from agentrig_grpo.naming import model_directory

    write_plain(checkpoint, target, model_directory)


def build_server(config: EmbeddedConfig) -> MakeServer:
    """Return what makes the server of a plan; torch is imported only in its process."""
    from agentrig_grpo.server.handle import Embedded

    return partial(Embedded, config)


def server_memory(config: EmbeddedConfig) -> ServerMemory:
    """Return what the settings of `embedded` say of its memory."""
    from agentrig.servers import ServerMemory

    beside = (1 << 30) + (config.prompt_cache_mb << 20)
    return ServerMemory(
        sequences=config.batch, beside=beside, asleep=1 << 30, keeps_weights=True, cache=config.kv_cache_mb << 20
    )


@hookimpl
def register_servers() -> Iterable[ServerSpec]:
    """Register `embedded`."""
    yield ServerSpec(
        name="embedded",
        summary="A small LLM server in torch, on a CPU or on the learner's device.",
        config=EmbeddedConfig,
        build=build_server,
        rank=0,
        sequences=lambda config: config.batch,
        memory=server_memory,
    )


@hookimpl
def register_algorithms() -> Iterable[AlgorithmSpec]:
    """Register `grpo` and `sft`, which have one learner."""
    from agentrig_grpo.checks import check_memory_plan

    def spec(**more: Any) -> AlgorithmSpec:
        return AlgorithmSpec(
            **more,
            build=build,
            workload=workload,
            ready=ready,
            server=True,
            make_start=make_start,
            export=export,
            formulas=("update",),
        )

    yield spec(
        name="grpo",
        summary="Group-relative policy optimization in torch, for a CPU or one device.",
        config=GrpoConfig,
        credit="dr-grpo",
        checks=(check_memory_plan,),
    )
    yield spec(
        name="sft",
        summary="Supervised fine-tuning: learns from demonstrations, by cross-entropy.",
        config=SftConfig,
    )
