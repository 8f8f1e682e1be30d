"""A game for agents in any language: the model may roll a die of its choice, and more sides pay more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from agentrig import Outcome, RecipeSpec, RewardSpec, Score, Task, TasksSpec, hookimpl

DICE = (4, 6, 8, 12, 20)
"""The sides of the dice that there are."""


class Rounds:
    """Rounds of the game; each split has its own."""

    splits: Sequence[str] = ("train", "validation", "test")
    roles: Mapping[str, str] = {"train": "train", "validation": "validation", "report": "test"}

    def load(self, split: str) -> Sequence[Task]:
        """Return 100 rounds."""
        first = 100 * self.splits.index(split)
        return [Task(id=f"{split}-{n}", input={"question": f"round {n}"}) for n in range(first, first + 100)]


def sides(task: Task, outcome: Outcome, budget_s: float) -> Score:
    """Score an answer such as `{"sides": 6}`: the sides of the die by those of the largest; 0 for one that is none."""
    rolled = outcome.answer.get("sides") if isinstance(outcome.answer, dict) else None
    return Score.ok(rolled / max(DICE) if rolled in DICE else 0.0, correct=rolled == max(DICE))


@hookimpl
def register_tasks() -> Iterable[TasksSpec]:
    """Register the task set `dice`."""
    yield TasksSpec(name="dice", summary="Rounds of a game with dice.", build=lambda config: Rounds())


@hookimpl
def register_rewards() -> Iterable[RewardSpec]:
    """Register the reward `dice`."""
    yield RewardSpec(name="dice", summary="The more sides, the better.", build=lambda config: sides)


@hookimpl
def register_recipes() -> Iterable[RecipeSpec]:
    """Register the recipe `dice`; its run files choose the agent."""
    yield RecipeSpec(
        name="dice",
        summary="Learns to roll the largest die, from a model of examples/programs/start.py.",
        settings={
            "tasks": {"use": "dice"},
            "agent": {"use": "command", "folder": "examples/programs", "exit_codes": {"22": "llm-error"}},
            "reward": {"use": "dice"},
            "adapter": {"use": "agent-match", "match": "player|program"},
            "algorithm": {
                "use": "grpo",
                "model": "models/dice",
                "steps": 10,
                "tasks_per_step": 8,
                "group_size": 4,
                "max_tokens": 40,
                "lr": 8e-4,
                "validate_every": 0,
            },
            "run": {"report_tasks": 16},
            "runners": {"n": 1, "threads": 4},
        },
    )
