"""A domain of one's own: repair a JSON document until it validates against its schema."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from agentrig import AgentSpec, RecipeSpec, RewardSpec, TasksSpec, hookimpl
from agentrig_json_repair.agent import AgentConfig, demonstrate, repair
from agentrig_json_repair.reward import score
from agentrig_json_repair.tasks import RepairTasks, TasksConfig


@hookimpl
def register_tasks() -> Iterable[TasksSpec]:
    """Register the task set `json-repair`."""
    yield TasksSpec(
        name="json-repair",
        summary="Small documents with one to three faults, each with its schema.",
        config=TasksConfig,
        build=RepairTasks,
    )


@hookimpl
def register_agents() -> Iterable[AgentSpec]:
    """Register the agent `json-repair`."""

    def build(config: AgentConfig) -> Callable[..., str]:
        return partial(repair, turns=config.turns)

    def right_replies(config: Any) -> Any:
        return demonstrate

    yield AgentSpec(
        name="json-repair",
        summary="Shows the model the validator's first error, and tries again.",
        config=AgentConfig,
        build=build,
        preload=("openai", "jsonschema"),
        demonstrate=right_replies,
    )


@hookimpl
def register_rewards() -> Iterable[RewardSpec]:
    """Register the reward `json-repair`."""
    yield RewardSpec(
        name="json-repair",
        summary="What was repaired and what was kept; 1 if the document is right.",
        build=lambda config: score,
    )


@hookimpl
def register_recipes() -> Iterable[RecipeSpec]:
    """Register the recipe `json-repair`."""
    yield RecipeSpec(
        name="json-repair",
        summary="Learns to repair JSON documents, from a model of `agentrig warmup json-repair`, on two cores.",
        settings={
            "run": {"validation_tasks": 64},
            "tasks": {"use": "json-repair"},
            "agent": {"use": "json-repair"},
            "reward": {"use": "json-repair"},
            "adapter": {"use": "agent-match", "match": "repair"},
            "algorithm": {
                "use": "grpo",
                "model": "models/json-repair",
                "steps": 88,
                # Large groups: a document with several faults is seldom right at the start.
                "tasks_per_step": 40,
                "group_size": 8,
                "max_tokens": 32,
                "lr": 5e-4,
                "warmup_steps": 10,
                "ppo_epochs": 2,
                "mini_batches": 2,
                "validate_every": 55,
            },
            "credit": {"use": "grpo"},
            "runners": {"n": 2, "threads": 16, "deadline_s": 60.0},
        },
    )
