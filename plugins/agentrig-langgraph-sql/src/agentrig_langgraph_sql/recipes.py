"""The recipe `mini`: the reference agent on small databases, from a model of a million parameters, on a CPU."""

from __future__ import annotations

from collections.abc import Iterable

from agentrig import RecipeSpec

MINI = RecipeSpec(
    name="mini",
    summary="Trains the SQL agent from the shipped 1M-parameter model on a CPU, in minutes; nothing to download.",
    settings={
        "run": {"validation_tasks": 128},
        "tasks": {"use": "mini-sql"},
        "agent": {
            "use": "langgraph-sql",
            "prompts": "short",
            "max_turns": 2,
            "max_tokens": 40,
            # The starting model was warmed up on results of this length.
            "execution_truncate": 64,
        },
        "reward": {"use": "spider-exec"},
        "adapter": {"use": "agent-match", "match": "write"},
        "algorithm": {
            "use": "grpo",
            "model": "mini",
            "steps": 40,
            "tasks_per_step": 64,
            "group_size": 8,
            "lr": 2e-4,
            "warmup_steps": 5,
            "negative_scale": 0.5,
            "validate_every": 10,
        },
        "hardware": {"use": "auto"},
        "runners": {"n": 2, "threads": 16, "deadline_s": 60.0},
    },
)


def specs() -> Iterable[RecipeSpec]:
    """Return this distribution's recipes."""
    return (MINI,)
