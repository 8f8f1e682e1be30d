"""What a run still takes: its steps, and what it does between and after them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import attrs

from agentrig.audit.verdicts import FIRST, SHARE
from agentrig.figures import mean, number, unaudited_s
from agentrig.observers import RunStart
from agentrig.view.figures import SMOOTHING
from agentrig.view.reading import dig


def _recent() -> deque[float]:
    return deque(maxlen=SMOOTHING)


@attrs.define(kw_only=True)
class TimeLeft:
    """Estimates the rest of a run from the lines of its steps.

    Checkpoints and transfers of weights are parts of a step. Validations and audits come in some steps only, and are
    counted apart: each as long as those before it. What has not happened yet is taken to last as long as what is most
    like it: a validation as long as the held-out measurement does for so many tasks, an audit as long as a step.

    Attributes:
        steps: Of the whole run; None if it is not known.
        validate_every: Steps from one validation to the next; 0 for none.
        ends_validated: Whether the last step is validated in any case.
        audited: The last of the first steps, which are all audited; 0 if none is.
        reports: Whether the run measures the held-out tasks after its last step.
        tasks: The tasks of a measurement, by mode.
        report_s: Seconds of the measurement before training; 0 if it was not seen.
    """

    steps: int | None = None
    validate_every: int = 0
    ends_validated: bool = False
    audited: int = 0
    reports: bool = False
    tasks: Mapping[str, int] = attrs.field(factory=dict)
    report_s: float = 0.0
    _step_s: deque[float] = attrs.field(factory=_recent, init=False)
    _validation_s: deque[float] = attrs.field(factory=_recent, init=False)
    _audit_s: float | None = attrs.field(default=None, init=False)
    _rollouts_per_s: float | None = attrs.field(default=None, init=False)

    @classmethod
    def of(cls, event: RunStart) -> TimeLeft:
        """Return what the settings of a run say of it."""
        every = int(number(dig(event.config, "algorithm", "validate_every")) or 0)
        return cls(
            steps=event.steps,
            validate_every=every,
            ends_validated=every > 0 and dig(event.config, "algorithm", "final") == "best",
            audited=event.first_step + FIRST - 1 if dig(event.config, "run", "audit") else 0,
        )

    def add(self, step: int, line: Mapping[str, Any]) -> None:
        """Add the line of a step."""
        seconds = unaudited_s(line)
        if seconds is None:
            return
        validation_s = number(dig(line, "time_s", "validation")) or 0.0
        self._step_s.append(seconds - validation_s)
        if line.get("validation_accuracy") is not None:
            self._validation_s.append(validation_s)
        if step - 1 <= self.audited:  # it waited for the audit of the step before
            self._audit_s = number(dig(line, "time_s", "audit")) or self._audit_s
        self._rollouts_per_s = number(line.get("rollouts_per_s")) or self._rollouts_per_s

    def after(self, done: int) -> float | None:
        """Return the seconds from the end of step `done` to the end of the run; None if they are not known."""
        step_s = mean(self._step_s)
        if self.steps is None or step_s is None or done >= self.steps:
            return None
        steps = (self.steps - done) * step_s
        validations = self._validations(done) * (mean(self._validation_s) or self._measurement_s("validation"))
        first_audits = max(0, min(self.audited, self.steps) - done + 1) * (self._audit_s or step_s)
        later_audits = SHARE * steps if self.audited else 0.0
        report = self._measurement_s("report") if self.reports or self.report_s else 0.0
        return steps + validations + first_audits + later_audits + report

    def _validations(self, done: int) -> int:
        """Return how many validations are to come."""
        if not self.validate_every or self.steps is None:
            return 0
        whole = self.steps // self.validate_every - done // self.validate_every
        return whole + bool(self.ends_validated and self.steps % self.validate_every)

    def _measurement_s(self, mode: str) -> float:
        """Estimate a measurement by the one before training, or by how fast rollouts of training are."""
        n, measured = self.tasks.get(mode, 0), self.tasks.get("report", 0)
        if self.report_s and (mode == "report" or measured):
            return self.report_s if mode == "report" else self.report_s * n / measured
        return n / self._rollouts_per_s if self._rollouts_per_s else 0.0
