"""What counts as correct: one rule for every reported accuracy (docs/rewards.md)."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

log = logging.getLogger(__name__)

CORRECT_AT = 1.0
"""Default threshold: an answer with at least this reward counts as correct."""

TURN = re.compile(r"(right|repaired|broken) at turn \d+|wrong at every turn")
"""What `turn_of` returns."""

NO_RULE = f"accuracy counts an answer as correct if its reward is at least {CORRECT_AT:g} (the default)"
"""How the warning begins of a reward of another scale than 0 to 1, and no rule that says what is correct."""

CORRECT_TOLD = "correct_told"
"""The key of a run's summary: whether the reward or the user says what is correct, or only that default."""


def as_much(value: float, full: float) -> bool:
    """Whether a reward is as high as another one, to within rounding."""
    return value >= full - 1e-9 * max(1.0, abs(full))


@attrs.define(kw_only=True, eq=False)
class Correctness:
    """Decides whether answers are correct.

    Attributes:
        run_at: The user's own threshold, `[run] correct_at`.
        reward_at: The reward's threshold, `RewardSpec.correct_at`.
        warning: The warning logged when no threshold is set and a reward is outside 0 to 1; empty before that.
        told: Whether something else than the default threshold has decided about an answer.
    """

    run_at: float | None = None
    reward_at: float | None = None
    warning: str = ""
    told: bool = False

    def decide(self, status: str, value: float, said: bool | None) -> bool:
        """Return whether an answer is correct. The first rule that applies decides.

        1. Its score is not `ok`: it is not correct.
        2. The user's threshold.
        3. What the reward says about this answer (`said`, from `Score.correct`).
        4. The reward's threshold.
        5. `CORRECT_AT`.
        """
        if status != "ok":
            return False
        self.told = self.told or any(known is not None for known in (self.run_at, said, self.reward_at))
        if self.run_at is not None:
            return value >= self.run_at
        if said is not None:
            return said
        if self.reward_at is not None:
            return value >= self.reward_at
        if not 0.0 <= value <= 1.0 and not self.warning:
            self._warn(value)
        return value >= CORRECT_AT

    def _warn(self, value: float) -> None:
        self.warning = (
            f"{NO_RULE}, but a reward of {value:g} is outside 0 to 1. Define what is correct: run.correct_at=VALUE, "
            "RewardSpec(correct_at=VALUE), or Score.ok(value, correct=True or False) (docs/rewards.md)"
        )
        log.warning("%s", self.warning)


def turn_of(calls: Sequence[float | None]) -> str | None:
    """Return at which turn a rollout became right or wrong, from `Score.calls`; None if no call was scored.

    A turn is a scored call; it is right if its value is at least `CORRECT_AT`. The last change decides. It has a
    meaning only where each scored call has an answer, such as a query: a reward of such calls gives it as
    `Score.details["turn"]`.

    Example:
        >>> turn_of([0.0, None, 1.0]), turn_of([0.0, 1.0, 0.0]), turn_of([1.0])
        ('repaired at turn 2', 'broken at turn 3', 'right at turn 1')
    """
    right = [value >= CORRECT_AT for value in calls if value is not None]
    if not any(right):
        return "wrong at every turn" if right else None
    changed = next((turn for turn in range(len(right), 1, -1) if right[turn - 1] != right[turn - 2]), 1)
    return f"{'broken' if not right[-1] else 'repaired' if changed > 1 else 'right'} at turn {changed}"


def by_turn(details: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return how many rollouts became right or wrong at which turn, from their `Score.details`."""
    said = (str(of["turn"]) for of in details if of.get("turn"))
    counts = Counter(turn for turn in said if TURN.fullmatch(turn))
    return {turn: counts[turn] for turn in sorted(counts, key=turn_order)}


def wrong_calls(rollouts: Iterable[Sequence[float | None]]) -> dict[str, int]:
    """Return how many calls were `scored`, and how many of them below `CORRECT_AT`: `wrong`; empty without any."""
    scores = [value for calls in rollouts for value in calls if value is not None]
    return {"wrong": sum(value < CORRECT_AT for value in scores), "scored": len(scores)} if scores else {}


def turn_order(turn: str) -> tuple[int, int]:
    """Return the place of what `turn_of` returns among others of its kind."""
    kind, *_, number = turn.split()
    return ("right", "repaired", "broken", "wrong").index(kind), int(number) if number.isdecimal() else 0
