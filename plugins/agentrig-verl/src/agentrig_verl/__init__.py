"""The algorithm `verl`: the recipe's agent trained with verl and vLLM on Ray, and the recipes for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from agentrig import AlgorithmSpec, RecipeSpec, hookimpl


def _build(config: Any) -> Any:
    from agentrig_verl.algorithm import Verl

    return Verl(config)


@hookimpl
def register_algorithms() -> Iterable[AlgorithmSpec]:
    """Register `verl`."""
    from agentrig_verl.checks import check_memory_plan, check_settings, check_symbols, check_verl_vllm
    from agentrig_verl.modelscope import check_modelscope, hub
    from agentrig_verl.ray_checks import check_place, check_ray_cluster, check_ray_sockets, check_ray_token
    from agentrig_verl.settings import VerlConfig, learning, workload
    from agentrig_verl.sharing import check_engine

    yield AlgorithmSpec(
        name="verl",
        summary="verl 0.9 and vLLM on one GPU or a Ray cluster: GRPO and verl's other estimators, FSDP, LoRA.",
        config=VerlConfig,
        build=_build,
        hardware=("cuda", "ascend"),
        workload=workload,
        hub=hub,
        runners=True,
        credit="grpo",
        learning=learning,
        checks=(
            check_symbols,
            check_settings,
            check_memory_plan,
            check_engine,
            check_verl_vllm,
            check_ray_cluster,
            check_ray_sockets,
            check_ray_token,
            check_place,
            check_modelscope,
        ),
    )


@hookimpl
def register_recipes() -> Iterable[RecipeSpec]:
    """Register `fast`, `qwen`, `llama` and `npu`."""
    from agentrig_verl.recipes import recipes

    return recipes()
