"""Rewards: the typed score of an outcome."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import attrs

from agentrig.agents import Outcome
from agentrig.correctness import Correctness
from agentrig.tasks import Task
from agentrig.traces import REWARD, SERVER, Span, Trace

VALUE_LIMIT = 1e9
"""Largest absolute value of a score: its square, summed over a step, stays finite in 32-bit floats."""


DIGITS = 12
"""Decimals and significant digits of a score: a sum of 1,000 parts of up to 1 rounds by at most 1000 * 1.1e-16."""


def rounded(value: Any) -> Any:
    """Return a number without what 64-bit sums round by, so that 0.1 + 0.2 is 0.3; other things as they are."""
    return round(float(f"{value:.{DIGITS}g}"), DIGITS) + 0.0 if isinstance(value, float) else value  # -0.0 too


def _values(calls: Iterable[float | None]) -> tuple[float | None, ...]:
    return tuple(map(rounded, calls))


@attrs.frozen(kw_only=True)
class Score:
    """The score of an outcome.

    Attributes:
        status: `ok`: scored. `timeout`: the policy's answer exceeded its time budget. That is the policy's
            fault, so the rollout is trained on with `value` (usually 0.0). `invalid`: the environment or the
            reward failed, not the policy; the rollout is left out of the group's baseline and counts as a failure.
        value: The reward to train on, at most `VALUE_LIMIT` in size; None if and only if the status is `invalid`. It is
            rounded to 12 decimals and 12 digits, as are `calls`: rewards that differ less than that are one reward.
        components: Named parts of the value, for the report: finite numbers; not trained on.
        details: Anything else that explains the score (a reason, an error): JSON values; others become text. `feedback`
            says what was wrong or right with the answer: "the query has no such column".
        correct: Whether the answer counts as correct, for accuracy; not trained on. With None, a threshold decides
            (`agentrig.correctness`). Only an `ok` score can be correct.
        calls: What the reward would be if the rollout had ended with each call: one value for each call of
            `Trace.llm_calls()`, in that order. None for a call without an answer, or whose answer could not be scored.
            Empty if the reward does not score calls. Only the credit `turn`, or one of your own, trains on them.
    """

    status: Literal["ok", "invalid", "timeout"]
    value: float | None = attrs.field(default=None, converter=rounded)
    components: Mapping[str, float] = attrs.field(factory=dict)
    details: Mapping[str, Any] = attrs.field(factory=dict)
    correct: bool | None = None
    calls: Sequence[float | None] = attrs.field(default=(), converter=_values)

    def __attrs_post_init__(self) -> None:
        if self.status not in ("ok", "invalid", "timeout"):
            raise ValueError(f"status is {self.status!r}; use 'ok', 'invalid' or 'timeout'")
        if self.correct is not None and not isinstance(self.correct, bool):
            raise ValueError(
                f"a score's correct is {self.correct!r}; use True, False or None (a component needs another name)"
            )
        if self.correct and self.status != "ok":
            raise ValueError(f"a score with status {self.status!r} cannot be correct; only 'ok' can")
        for name in ("components", "details"):
            if not isinstance(getattr(self, name), Mapping):
                raise TypeError(
                    f"a score's {name} are {getattr(self, name)!r}; they must be a mapping of names to values"
                )
        if (self.value is None) != (self.status == "invalid"):
            raise ValueError(f"a score with status {self.status!r} has value {self.value!r}; only 'invalid' has none")
        for name, part in self.components.items():
            if not math.isfinite(_number(f"component {name}", part)):
                raise ValueError(f"a score's component {name} is {part!r}, and a figure must be finite: leave it out")
        for name, value in (("value", self.value), *(("value of a call", value) for value in self.calls)):
            if value is not None and not abs(_number(name, value)) <= VALUE_LIMIT:
                cure = "give Score.invalid(WHY) where there is no number" if value != value else "scale it"
                raise ValueError(
                    f"a score's {name} is {value!r}; it must lie between -{VALUE_LIMIT:g} and {VALUE_LIMIT:g}, so that "
                    f"sums and squares of it stay finite in training: {cure}"
                )

    @property
    def feedback(self) -> str:
        """What was wrong or right with the answer, '' if the reward does not say it.

        It is recorded, shown, and read by an algorithm that reflects on it (`gepa`, `apo`). The agent never sees it.
        """
        return str(self.details.get("feedback") or "")

    def with_correct(self, correctness: Correctness) -> Score:
        """Return the score with `correct` decided; an `invalid` one is returned unchanged."""
        if self.value is None:
            return self
        correct = correctness.decide(self.status, self.value, self.correct)
        return self if correct is self.correct else attrs.evolve(self, correct=correct)

    @classmethod
    def ok(
        cls,
        value: float,
        *,
        correct: bool | float | None = None,
        feedback: str = "",
        calls: Sequence[float | None] | float = (),
        **components: float,
    ) -> Score:
        """Return an `ok` score.

        Args:
            correct: True or False, or 1 or 0: whether the answer counts as correct. No component has this name.
            feedback: What was wrong or right with the answer, as `Score.feedback` returns it.
            calls: As `Score.calls`. A number is the component of that name.

        Example:
            ```python
            Score.ok(0.3, feedback="the query has no such column")
            ```
        """
        if not isinstance(feedback, str):
            raise TypeError(f"a score's feedback is {feedback!r:.80} ({type(feedback).__name__}); give a text")
        details = {"feedback": feedback} if feedback else {}
        number = float(_number("value", value))
        if not isinstance(calls, Iterable):
            components, calls = {"calls": calls, **components}, ()
        verdict: Any = bool(correct) if correct in (0, 1) else correct
        return cls(
            status="ok", value=number, components=components, details=details, correct=verdict, calls=tuple(calls)
        )

    @classmethod
    def invalid(cls, reason: str, **details: Any) -> Score:
        """Return the score of an environment that failed, with the reason."""
        return cls(status="invalid", details={"reason": reason, **details})

    @classmethod
    def timeout(cls, reason: str, value: float = 0.0, **details: Any) -> Score:
        """Return the score of an answer that exceeded its time budget."""
        return cls(status="timeout", value=value, details={"reason": reason, **details})


def _number(what: str, value: Any) -> Any:
    if not hasattr(value, "__float__"):  # float() would read a text
        raise TypeError(f"a score's {what} is {value!r:.80} ({type(value).__name__}); give a number")
    return value


def given(trace: Trace) -> list[tuple[Span, float]]:
    """Return the rewards that the agent itself gave (`agentrig.reward`), each with its span, in order of start.

    They come from the agent's process: what is no finite number of at most `VALUE_LIMIT` in size is left out.
    """
    found = ((span, span.attributes.get(REWARD)) for span in trace.spans)
    return [(s, float(v)) for s, v in found if isinstance(v, int | float) and abs(v) <= VALUE_LIMIT]


def given_to_calls(trace: Trace) -> list[float | None]:
    """Return the reward that the agent gave to each of `trace.llm_calls()`; None for a call without one.

    See `agentrig.reward` for the rule.
    """
    calls = [call for call in trace.llm_calls() if SERVER not in call.attributes]
    around = {call.id: {span.id for span in trace.ancestors(call)} for call in calls}
    found: dict[str, float] = {}
    for span, value in given(trace):
        before = [call for call in calls if call.end <= span.start]
        inside = ([call for call in before if outer.id in around[call.id]] for outer in trace.ancestors(span))
        if nearest := next(filter(None, inside), None):
            found[nearest[-1].id] = value
    return [found.get(call.id) for call in trace.llm_calls()]


Reward = Callable[[Task, Outcome, float], Score] | Callable[[Task, Outcome, float, Trace], Score]
"""What `RewardSpec.build` returns: called as `reward(task, outcome, budget_s)`.

It is called only for outcomes without a failure, from several threads at once. It may also have a
method `score_many(items: Sequence[tuple[Task, Outcome]], budget_s) -> Sequence[Score]`, which is
then called with a whole batch instead (`budget_s` is per item). If a reward raises, or clearly
exceeds its budget, the score is `invalid`.

A reward whose spec says `sees_trace` gets the rollout's `agentrig.Trace` too: `reward(task, outcome, budget_s, trace)`,
and the items of `score_many` are `(task, outcome, trace)`.
"""


@attrs.frozen(kw_only=True)
class Part:
    """A reward inside another one, as `build(config, parts=…)` of a spec with `parts` gets it.

    Attributes:
        reward: What the inner spec's `build` returned.
        correct_at: The inner spec's threshold of a correct answer.
        sees_trace: Whether it is called with the trace too.
    """

    reward: Reward
    correct_at: float | None = None
    sees_trace: bool = False
