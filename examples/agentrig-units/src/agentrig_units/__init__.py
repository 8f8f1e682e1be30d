"""A domain of one's own: an assistant that converts units with tools."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from agentrig import AgentSpec, RecipeSpec, RewardSpec, TasksSpec, hookimpl
from agentrig_units.agent import AgentConfig, convert, demonstrate
from agentrig_units.reward import score
from agentrig_units.tasks import TasksConfig, UnitTasks


@hookimpl
def register_tasks() -> Iterable[TasksSpec]:
    """Register the task set `units`."""
    yield TasksSpec(
        name="units",
        summary="Questions about lengths, weights, times and volumes, in many wordings.",
        config=TasksConfig,
        build=UnitTasks,
    )


@hookimpl
def register_agents() -> Iterable[AgentSpec]:
    """Register the agent `units`."""

    def build(config: AgentConfig) -> Callable[..., str]:
        return partial(convert, turns=config.turns)

    def right_replies(config: Any) -> Any:
        return demonstrate

    yield AgentSpec(
        name="units",
        summary="Converts units with two tools: a table of factors and a calculator.",
        config=AgentConfig,
        build=build,
        preload=("openai",),
        demonstrate=right_replies,
    )


@hookimpl
def register_rewards() -> Iterable[RewardSpec]:
    """Register the reward `units`."""
    yield RewardSpec(
        name="units",
        summary="1 for the right number and unit, less for one of the two.",
        build=lambda config: score,
    )


@hookimpl
def register_recipes() -> Iterable[RecipeSpec]:
    """Register the recipe `units`."""
    yield RecipeSpec(
        name="units",
        summary="Learns to convert units with tools, from a model of `agentrig warmup units`, on two cores.",
        settings={
            "run": {"validation_tasks": 128},
            "tasks": {"use": "units"},
            "agent": {"use": "units"},
            "reward": {"use": "units"},
            "adapter": {"use": "agent-match", "match": "assistant"},
            "algorithm": {
                "use": "grpo",
                "model": "models/units",
                "steps": 50,
                "tasks_per_step": 64,
                "group_size": 4,
                "max_tokens": 48,
                "lr": 3e-4,
                "warmup_steps": 10,
                "ppo_epochs": 2,
                "mini_batches": 2,
                "validate_every": 10,
            },
            "credit": {"use": "grpo", "negative_scale": 0.5},
            "runners": {"n": 2, "threads": 16, "deadline_s": 60.0},
        },
    )
