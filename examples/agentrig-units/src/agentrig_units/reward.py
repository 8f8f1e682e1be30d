"""The reward `units`: correct if number and unit are right."""

from __future__ import annotations

from agentrig import Outcome, Score, Task


def score(task: Task, outcome: Outcome, budget_s: float) -> Score:
    """Score an answer such as `84 inches`: 1 if it is right, 0.4 for the number alone, 0.1 for the unit alone."""
    said = outcome.answer.split() if isinstance(outcome.answer, str) and len(outcome.answer) < 200 else []
    number, unit = task.private["gold"].split()
    right = [len(said) == 2 and said[0] == number, len(said) == 2 and said[1] == unit]
    value = 1.0 if all(right) else 0.4 * right[0] + 0.1 * right[1]
    return Score.ok(value, correct=all(right), number=float(right[0]), unit=float(right[1]))
