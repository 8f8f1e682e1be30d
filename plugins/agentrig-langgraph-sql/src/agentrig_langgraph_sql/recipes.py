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
            "steps": 52,
            # Many tasks with few rollouts each: every step has many wordings.
            "tasks_per_step": 96,
            "group_size": 4,
            "lr": 2e-4,
            # AdamW's first updates are full-size although its averages are still noisy.
            "warmup_steps": 20,
            # Updates are cheap compared with rollouts, so each step makes two passes over its rollouts.
            "ppo_epochs": 2,
            "mini_batches": 2,
            "validate_every": 13,
        },
        "credit": {"use": "grpo", "negative_scale": 0.5},
        "hardware": {"use": "auto"},
        # Many rollouts at once: the model's server answers a larger batch in little more time.
        "runners": {"n": 2, "threads": 32, "deadline_s": 60.0},
    },
)

SPIDER = RecipeSpec(
    name="spider",
    summary="The SQL agent on Spider, reported on 500 rows of test; name an instruct model: algorithm.model=DIR.",
    settings={
        "run": {"validation_tasks": 200},
        "tasks": {"use": "spider"},
        "agent": {"use": "langgraph-sql", "prompts": "full", "max_turns": 3, "sample_rows": 3},
        "reward": {"use": "spider-exec"},
        "adapter": {"use": "agent-match", "match": "write"},
        "algorithm": {
            "use": "grpo",
            # No shipped model can answer Spider's questions. Training stops with this name in its message.
            "model": "NAME-A-MODEL-DIRECTORY",
            "tasks_per_step": 32,
            "group_size": 4,
            "lr": 1e-6,
            "clip_low": 0.2,
            "clip_high": 0.3,
            "max_tokens": 2048,
            "max_length": 6144,
            "validate_every": 32,
        },
        "hardware": {"use": "auto"},
        "runners": {"n": 2, "threads": 16, "deadline_s": 300.0},
    },
)


def specs() -> Iterable[RecipeSpec]:
    """Return this distribution's recipes."""
    return MINI, SPIDER
