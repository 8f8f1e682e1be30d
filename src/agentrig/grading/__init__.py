"""Rewards of the core that judge by others: a weighted sum of rewards, and a model as a judge."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from agentrig import RewardSpec, hookimpl
from agentrig.grading.config import JudgeConfig, WeightedConfig, parts
from agentrig.rewards import Part


@hookimpl
def register_rewards() -> Iterable[RewardSpec]:
    """Register `weighted` and `judge`."""

    def weighted(config: Any, parts: Mapping[str, Part]) -> Any:
        from agentrig.grading.weighted import Weighted

        return Weighted(config, parts)

    def judge(config: Any) -> Any:
        from agentrig.grading.judge import Judge

        return Judge(config)

    yield RewardSpec(
        name="weighted", summary="A weighted sum of other rewards.", config=WeightedConfig, build=weighted, parts=parts
    )
    yield RewardSpec(name="judge", summary="A model grades by a rubric.", config=JudgeConfig, build=judge)
