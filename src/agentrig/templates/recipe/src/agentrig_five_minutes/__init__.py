"""The recipe `five-minutes`: the reference agent on small databases, with fewer steps and larger groups than `mini`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from agentrig import RecipeSpec, hookimpl

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "run": {"validation_tasks": 64, "report_tasks": 128},
    "tasks": {"use": "mini-sql"},
    "agent": {"use": "langgraph-sql", "prompts": "short", "max_turns": 2, "max_tokens": 40, "execution_truncate": 64},
    "reward": {"use": "spider-exec"},
    "adapter": {"use": "agent-match", "match": "write"},
    "algorithm": {
        "use": "grpo",
        "model": "mini",
        "steps": 24,
        "tasks_per_step": 64,
        "group_size": 6,
        "lr": 2e-4,
        "warmup_steps": 8,
        "ppo_epochs": 2,
        "mini_batches": 2,
        "validate_every": 12,
    },
    "credit": {"use": "grpo", "negative_scale": 0.5},
    "hardware": {"use": "auto"},
    "runners": {"n": 2, "threads": 16, "deadline_s": 60.0},
}
"""Section to keys, as in a run file; every key is checked when a run starts."""


@hookimpl
def register_recipes() -> Iterable[RecipeSpec]:
    """Register `five-minutes`."""
    yield RecipeSpec(name="five-minutes", summary="The SQL agent on small databases, in few steps.", settings=SETTINGS)
