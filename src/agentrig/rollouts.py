"""Rollouts: one attempt of an agent at a task, with its score."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import attrs

from agentrig.adapters import Triplet
from agentrig.agents import Outcome
from agentrig.correctness import CORRECT_AT
from agentrig.rewards import Score
from agentrig.tasks import Task
from agentrig.traces import Trace

Mode = Literal["train", "validation", "report", "dev"]


def mode_name(mode: str) -> str:
    """Return what a message calls the rollouts of a mode: `report` ones are held-out."""
    return "held-out" if mode == "report" else mode


@attrs.frozen(kw_only=True)
class Rollout:
    """One attempt of an agent at a task, run, scored and adapted.

    Attributes:
        id: Unique within the run.
        task: With its private part.
        group: The same for the n rollouts of one task in one step.
        mode: `train` rollouts are trained on, `validation` and `report` ones are measured.
        step: The training step it belongs to.
        outcome: What the agent answered, or how it failed.
        score: None if and only if the outcome is a failure.
        trace: Everything that was recorded.
        triplets: The calls to train on, with `reward` set; empty for a failure.
        start: Unix time in seconds.
        duration_s: Wall time of the agent.
        reward_s: Wall time of the reward without the start of its process (a batch's time is shared evenly).
        version: Version of the weights that answered its calls (the step that made them): the oldest that the server
            stated, else the one that the algorithm names; None if neither does.
    """

    id: str
    task: Task
    group: str
    mode: Mode
    step: int
    outcome: Outcome
    score: Score | None
    trace: Trace = attrs.field(repr=False)
    triplets: Sequence[Triplet] = attrs.field(default=(), repr=False)
    start: float = 0.0
    duration_s: float = 0.0
    reward_s: float = 0.0
    version: int | None = None

    @property
    def failure(self) -> str | None:
        """The failure's kind (`reward-invalid` if the score is `invalid`), or None."""
        if self.outcome.failure is not None:
            return self.outcome.failure
        return "reward-invalid" if self.score is None or self.score.status == "invalid" else None

    @property
    def value(self) -> float | None:
        """The reward to train on; None for a failure, which is left out of every baseline."""
        return None if self.failure or self.score is None else self.score.value

    @property
    def correct(self) -> bool | None:
        """Whether the answer counts as correct (see `docs/rewards.md`); None for a failure."""
        if self.failure or self.score is None or self.score.value is None:
            return None
        if self.score.correct is not None:  # set for every score of a run
            return self.score.correct
        return self.score.status == "ok" and self.score.value >= CORRECT_AT


OnGroups = Callable[[Mapping[int, Sequence[Rollout]]], None]
"""Called with complete groups: a task's index in the batch to its n rollouts, failures included."""
