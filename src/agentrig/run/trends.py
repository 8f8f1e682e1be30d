"""The guards over several steps: their counts are rebuilt from the lines of metrics.

A resumed run therefore stops under the same conditions as an uninterrupted one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from agentrig.errors import RunStopped
from agentrig.figures import GRAD_NORM
from agentrig.rollouts import Rollout
from agentrig.run.guards import check_rewards, same_reward

log = logging.getLogger(__name__)

SAME_REWARDS = 3
"""Number of steps in a row with a single reward value that stops the run."""

SOLVED = 3
"""Number of steps in a row, with every rollout correct and the same reward, after which the tasks are solved."""

UNCHANGED = 2
"""Number of steps in a row with unchanged weights that stops the run."""

NOT_FINITE = 2
"""Number of steps in a row with a non-finite loss or gradient that stops the run."""


@attrs.define
class Guards:
    """Counts of consecutive steps, up to the latest one, with a condition that stops a run if it persists.

    Attributes:
        same_rewards: Steps in which all rollouts got the same reward.
        all_correct: Steps in which, in addition, all rollouts are correct.
        unchanged: The steps that did not change the weights. Steps in which all rollouts got the same reward
            are skipped: there is nothing to learn from them.
        not_finite: Steps in which the loss or the gradient norm was NaN or infinite.
    """

    same_rewards: int = 0
    all_correct: int = 0
    unchanged: tuple[int, ...] = ()
    not_finite: int = 0

    @classmethod
    def after(cls, lines: Sequence[Mapping[str, Any]]) -> Guards:
        """Return the guards after the steps of these lines of `metrics.jsonl`."""
        guards = cls()
        for line in lines:
            guards.add(line)
        return guards

    def add(self, line: Mapping[str, Any]) -> None:
        """Count a step that has ended; `line` is its line of `metrics.jsonl`."""
        figures = line["algorithm"]
        judged = line["rollouts"] - sum(line["failures"].values())
        same = judged > 1 and line["reward_std"] == 0
        # Lines of earlier versions have no accuracy; correct was then a reward of at least 1.
        correct = line["accuracy"] == 1 if "accuracy" in line else same and line["reward"] >= 1
        self.same_rewards = self.same_rewards + 1 if same else 0
        self.all_correct = self.all_correct + 1 if same and correct else 0
        self.not_finite = self.not_finite + 1 if _not_finite(figures) else 0
        if not same:
            self.unchanged = (*self.unchanged, line["step"]) if figures.get("weight_change", 1.0) == 0 else ()

    @property
    def solved(self) -> bool:
        """Whether the tasks are solved: there is nothing left to learn from them."""
        return self.all_correct >= SOLVED

    def judge(self, rollouts: Sequence[Rollout], *, step: int) -> bool:
        """Check the rewards of the current step, before they are trained on.

        Args:
            rollouts: All rollouts of the step so far.
            step: The training step.

        Returns:
            Whether the tasks are solved with this step.

        Raises:
            RunStopped: All rollouts got the same reward: in the first step immediately, later if that persists and
                they are not correct.
        """
        if not same_reward(rollouts):
            return False
        correct = all(r.correct for r in rollouts if r.value is not None)
        if step == 1 or (self.same_rewards + 1 >= SAME_REWARDS and not correct):
            check_rewards(rollouts, step=step)
        return correct and self.all_correct + 1 >= SOLVED

    def check(self, line: Mapping[str, Any]) -> None:
        """Stop when the updates of the latest steps changed nothing or diverged.

        Raises:
            RunStopped: The message says what was observed and what to change.
        """
        step, figures = line["step"], line["algorithm"]
        change = figures.get("weight_change", 1.0)
        found = ", ".join(_not_finite(figures))
        if not math.isfinite(change):
            raise RunStopped(
                f"step {step}: the weight change is {change}: training has diverged. Lower the learning rate "
                "(algorithm.lr) or the gradient norm; the last good checkpoint is in checkpoints/.",
                cause="diverged",
            )
        if self.not_finite >= NOT_FINITE:
            raise RunStopped(
                f"steps {step - 1} and {step}: {found}: updates with such gradients change no weight, or spoil all. "
                "Lower the learning rate or the gradient norm, and look at ratio_max in metrics.jsonl, where it is "
                "there: large values mean that the server's log-probabilities are not the learner's. The last good "
                "checkpoint is in checkpoints/.",
                cause="diverged",
            )
        if found:
            log.warning("step %d: %s; the run stops if that happens again in the next step", step, found)
        if len(self.unchanged) >= UNCHANGED:
            steps = " and ".join(map(str, self.unchanged[-UNCHANGED:]))
            raise RunStopped(
                f"steps {steps} changed no weight. Is the learning rate 0, is every group's reward constant, or is "
                "nothing trainable?",
                cause="weights-unchanged",
            )


def _not_finite(figures: Mapping[str, float]) -> list[str]:
    return [f"{name} {figures[name]}" for name in ("loss", GRAD_NORM) if not math.isfinite(figures.get(name, 0.0))]
