"""The guards over several steps: their state is rebuilt from the lines of metrics.

A resumed run therefore stops under the same conditions as an uninterrupted one.

**When steps without a signal stop a run.** A group whose rollouts all got the same reward has advantage zero, unless
the rewards of its calls differ and the credit learns from them. In a healthy run that happens to a share q of the
groups, and by chance to all groups of a step, some steps in a row. A run stops when m such groups in a row have a
probability

    q^m < CHANCE

m counts groups of the steps in a row up to now in which no group had unlike rewards. Groups that are right do not
count: a task that is solved is no fault. So m is the sum of groups * (1 - accuracy). q is the share of groups without
variance in the latest RECENT steps that had a signal, and at least

- ONE_VALUE, if m counts the steps in which all rollouts of all groups got one reward: a broken reward or agent.
- AGREEING, if m counts the steps in which rewards differ between groups only: rollouts of a task are all alike.

These two also decide while no step has had a signal. So a constant reward from the first step on stops the run
once 35 groups have it: after 35 / tasks_per_step steps. Right answers count too then, as AGREEING, because a reward may
ignore the answer. A run that ends before, with one reward in all steps, ends with the same error.

The error says what was seen. What led to it is said by the diagnosis (`agentrig.view.diagnosis`), which has all steps.

Steps in which a group has unlike rewards and the weights did not change are no chance: two in a row are enough.
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
from agentrig.run.guards import NO_SIGNAL, check_rewards
from agentrig.run.metrics import reward_figures

log = logging.getLogger(__name__)

CHANCE = 1e-6
"""A run without a signal stops when that is less likely by chance."""

ONE_VALUE = 2 / 3
"""The share of groups that all have one and the same reward, in a run of hard tasks that learns."""

AGREEING = 0.75
"""The share of groups without variance, in a run of very easy or very hard tasks that learns."""

RECENT = 20
"""Number of steps with a signal, up to the latest one, that the share of groups without variance is taken from."""

SOLVED = 3
"""Number of steps in a row, with every rollout correct and the same reward, after which the tasks are solved."""

UNCHANGED = 2
"""Number of steps in a row that had a signal and did not change the weights, which stops the run."""

LOOKED_AT = ("weight_change", "loss", GRAD_NORM)
"""The metrics of an algorithm that stop a run when they are not finite."""

NOT_FINITE = 2
"""Number of steps in a row with a non-finite loss or gradient that stops the run."""


@attrs.frozen(kw_only=True)
class Signal:
    """What the rewards of a step say.

    Attributes:
        groups: Number of groups with a reward.
        alike: The share of them without variance, or, where rewards of calls were learned from, that taught nothing.
        one_value: Whether all rollouts, two or more, got one reward, and no reward of a call was learned from.
        none: Whether no group has unlike rewards, nor calls that were learned from.
        accuracy: The share of correct rollouts; 0 if unknown.
    """

    groups: int
    alike: float
    one_value: bool
    none: bool
    accuracy: float

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Signal:
        """Return that of a step's line of `metrics.jsonl`, or of `agentrig.run.metrics.reward_figures`."""
        judged = line["rollouts"] - sum(line["failures"].values())
        groups, alike = line.get("groups", 1), line.get("zero_variance_groups") or 0.0
        untaught = line.get("untaught_groups") if line.get("unlike_calls") else None
        by_calls = untaught is not None and untaught < alike
        one_value = judged > 1 and line["reward_std"] == 0 and not by_calls
        alike = alike if untaught is None else min(alike, untaught)
        return cls(
            groups=groups,
            alike=alike,
            one_value=one_value,
            none=one_value or (alike == 1 and judged > groups),  # a group of one rollout says nothing
            accuracy=line.get("accuracy") or 0.0,
        )


@attrs.define
class Guards:
    """What the steps up to the latest one say, with a condition that stops a run if it persists.

    Attributes:
        varied: Whether rollouts of a step had unlike rewards.
        silent: Steps in a row without such a group.
        one_value: Groups of the steps in a row in which all rollouts got one reward, without those that are right.
        agreeing: Groups of the steps in a row in which no group had unlike rewards, without those that are right.
        recent: Groups, and the share of them without variance, of the latest steps that had a signal.
        all_correct: Steps in a row in which all rollouts are correct and got the same reward.
        unchanged: The steps in a row that had a signal and did not change the weights; others between them are skipped.
        not_finite: Steps in a row in which the loss or the gradient norm was NaN or infinite.
        untaught: The `untaught_groups` of the latest step in which rewards of calls differed; 0 before the first.
        demonstrated: Whether rollouts are demonstrations, or a teacher judges them: then rewards say nothing of what
            there is to learn.
    """

    varied: bool = False
    silent: int = 0
    one_value: float = 0.0
    agreeing: float = 0.0
    recent: tuple[tuple[int, float], ...] = ()
    all_correct: int = 0
    unchanged: tuple[int, ...] = ()
    not_finite: int = 0
    untaught: float | None = 0.0
    demonstrated: bool = False

    @classmethod
    def after(cls, lines: Sequence[Mapping[str, Any]], *, ended: bool = False, demonstrated: bool = False) -> Guards:
        """Return the guards after the steps of these lines of `metrics.jsonl`.

        Args:
            ended: The run had ended with them and is extended: what it counts in a row starts again.
        """
        guards = cls(demonstrated=demonstrated)
        for line in lines:
            guards.add(line)
        if not ended:
            return guards
        return cls(varied=guards.varied, recent=guards.recent, untaught=guards.untaught, demonstrated=demonstrated)

    def add(self, line: Mapping[str, Any]) -> None:
        """Count a step that has ended; `line` is its line of `metrics.jsonl`."""
        figures, signal = line["algorithm"], Signal.of(line)
        self.all_correct = self.all_correct + 1 if signal.one_value and line.get("accuracy") == 1 else 0
        self.not_finite = self.not_finite + 1 if _not_finite(figures) else 0
        self.untaught = line.get("untaught_groups") if line.get("unlike_calls") else self.untaught
        self._count(signal)
        if (self.demonstrated or not signal.none) and figures.get("trained_tokens", 1):
            self.unchanged = (*self.unchanged, line["step"]) if figures.get("weight_change", 1.0) == 0 else ()

    def _count(self, signal: Signal) -> None:
        self.varied = self.varied or not signal.one_value
        if not signal.none:
            self.silent, self.one_value, self.agreeing = 0, 0.0, 0.0
            self.recent = (*self.recent, (signal.groups, signal.alike))[-RECENT:]
            return
        self.silent += 1
        wrong = signal.groups * (1 - signal.accuracy)
        self.agreeing += wrong
        self.one_value = (self.one_value + (wrong if self.varied else signal.groups)) if signal.one_value else 0.0

    def chance(self, groups: float, least: float) -> float:
        """Return how likely it is that so many groups in a row have no variance; see the top of this file."""
        total = sum(n for n, _ in self.recent)
        share = sum(n * alike for n, alike in self.recent) / total if total else 0.0
        return float(max(least, share) ** groups)

    @property
    def solved(self) -> bool:
        """Whether the tasks are solved: there was something to learn from them, and nothing is left."""
        return self.varied and self.all_correct >= SOLVED and not self.demonstrated

    def check_signal(self, rollouts: Sequence[Rollout], *, step: int, credit: Any = None) -> bool:
        """Check the rewards of the current step, before they are trained on.

        Args:
            credit: The settings of the run's credit.

        Returns:
            Whether the tasks are solved with this step.

        Raises:
            RunStopped: There has been no signal for longer than chance explains, or nothing was right to begin with.
        """
        # whether the credit learns from the rewards of calls is known of the steps before
        signal = Signal.of({**reward_figures(rollouts, credit), "untaught_groups": self.untaught})
        if self.demonstrated or not signal.none:
            return False
        now = attrs.evolve(self)
        now._count(signal)
        correct = signal.one_value and all(r.correct for r in rollouts if r.value is not None)
        unanswered = not self.varied and all(r.outcome.answer is None for r in rollouts if r.value is not None)
        least = AGREEING if correct else ONE_VALUE
        chance = now.chance(now.agreeing, AGREEING)
        if signal.one_value and (unanswered or now.chance(now.one_value, least) < CHANCE):
            check_rewards(rollouts, step=step, running=now.silent)
        if chance < CHANCE:
            raise RunStopped(
                f"step {step}: for {now.silent} steps, the rollouts of each task got the same reward, so every "
                f"advantage is zero. For this run, that is no chance (probability {chance:.0e}).",
                cause=NO_SIGNAL,
            )
        return self.varied and correct and self.all_correct + 1 >= SOLVED

    def check(self, line: Mapping[str, Any]) -> None:
        """Stop when the updates of the latest steps changed nothing or diverged."""
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
                f"steps {steps} changed no weight, although "
                + ("there was something to learn" if self.demonstrated else "rewards differ within groups")
                + ". Is the learning rate 0, or is nothing trainable?",
                cause="weights-unchanged",
            )


def _not_finite(figures: Mapping[str, float]) -> list[str]:
    """Name loss and gradient where they are not finite; a line that was read again has null there."""
    found = {name: figures.get(name, 0.0) for name in LOOKED_AT[1:]}
    return [f"{name} {value}" for name, value in found.items() if value is None or not math.isfinite(value)]
