"""Rewards: the typed verdict on an outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import attrs

from agentrig.agents import Outcome
from agentrig.tasks import Task


@attrs.frozen(kw_only=True)
class Score:
    """A reward's verdict.

    Attributes:
        status: `ok`: judged. `timeout`: the policy's answer ran past its budget; its fault, so it
            trains with `value` (usually 0.0). `invalid`: the environment or the reward failed, not
            the policy; the rollout leaves the group's baseline and is counted as a failure.
        value: The number to learn from; None if and only if the status is `invalid`.
        components: Named parts of the value, for the report and audits; not learned from.
        details: Anything else that explains the verdict (a reason, an error); JSON values.
    """

    status: Literal["ok", "invalid", "timeout"]
    value: float | None = None
    components: Mapping[str, float] = attrs.field(factory=dict)
    details: Mapping[str, Any] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        if self.status not in ("ok", "invalid", "timeout"):
            raise ValueError(f"status is {self.status!r}; use 'ok', 'invalid' or 'timeout'")
        if (self.value is None) != (self.status == "invalid"):
            raise ValueError(f"a score with status {self.status!r} has value {self.value!r}; only 'invalid' has none")

    @classmethod
    def ok(cls, value: float, **components: float) -> Score:
        """Return a judged score."""
        return cls(status="ok", value=float(value), components=components)

    @classmethod
    def invalid(cls, reason: str, **details: Any) -> Score:
        """Return the score of an environment that failed, with the reason."""
        return cls(status="invalid", details={"reason": reason, **details})

    @classmethod
    def timeout(cls, reason: str, value: float = 0.0, **details: Any) -> Score:
        """Return the score of an answer that ran past its budget."""
        return cls(status="timeout", value=value, details={"reason": reason, **details})


Reward = Callable[[Task, Outcome, float], Score]
"""What `RewardSpec.build` returns: called as `reward(task, outcome, budget_s)`.

It is called only for outcomes without a failure, from several threads at once. It may also have a
method `score_many(items: Sequence[tuple[Task, Outcome]], budget_s) -> Sequence[Score]`, which is
then called with a whole batch instead (`budget_s` is per item). A reward that raises, or that runs
well past its budget, scores `invalid`.
"""
