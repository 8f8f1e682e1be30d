"""What counts as correct: one rule for every reported accuracy (docs/rewards.md)."""

from __future__ import annotations

import logging

import attrs

log = logging.getLogger(__name__)

CORRECT_AT = 1.0
"""Default threshold: an answer with at least this reward counts as correct."""


@attrs.define(kw_only=True, eq=False)
class Correctness:
    """Decides whether answers are correct.

    Attributes:
        run_at: The user's own threshold, `[run] correct_at`.
        reward_at: The reward's threshold, `RewardSpec.correct_at`.
        warning: The warning logged when no threshold is set and a reward is outside 0 to 1; empty before that.
    """

    run_at: float | None = None
    reward_at: float | None = None
    warning: str = ""

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
            f"accuracy counts an answer as correct if its reward is at least {CORRECT_AT:g} (the default), "
            f"but a reward of {value:g} is outside 0 to 1. Define what is correct: run.correct_at=VALUE, "
            "RewardSpec(correct_at=VALUE), or Score.ok(value, correct=True or False) (docs/rewards.md)"
        )
        log.warning("%s", self.warning)
