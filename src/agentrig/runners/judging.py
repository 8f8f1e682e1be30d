"""Calls a reward, and checks what it returns; in a thread of this process or in the reward's own one."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from time import monotonic  # a reward may replace that of the module
from typing import Any

import attrs

from agentrig.errors import place_of
from agentrig.processes.ends import forks_ended
from agentrig.processes.put_back import restored, restored_since
from agentrig.rewards import Reward, Score
from agentrig.tasks import field_hint
from agentrig.text import Room, TooLong, amount, copied, json_text, plain_values, words_of
from agentrig.traces import Span, Trace

GRACE_S = 1.0
"""Seconds by which a reward may exceed its budget before its score is `invalid`."""

DETAILS_LIMIT = 4_000_000
"""Longest details of a score, in characters of JSON: those of a process are within `ANSWER_LIMIT` even as a text."""

CURE = "Let the reward use them as they are: other code of its process needs them"
"""What to do about a reward that changes the process that it judges in, or is built in."""


class Late(Exception):
    """A reward came back after its budget."""


class NoScores(Exception):
    """A batch, or a job of the reward's process, gave no scores; the message is the reason."""


def score_one(reward: Reward, item: tuple[Any, ...], budget_s: float) -> Score:
    """Judge one outcome; whatever the reward raises or returns is a score.

    Raises:
        Late: It came back after its budget.
    """
    begun = monotonic()
    try:
        task, outcome, *trace = _copied(item)
        return _sound(_called(reward, task, outcome, budget_s, *trace, budget_s=budget_s))
    except Late:
        raise
    except BaseException as error:
        place = item[0].place or "made by the task set"
        about = {"answer": item[1].answer, "input": item[0].input, "private": item[0].private}
        return _raised(error, begun, place=place, **about)


def score_many(many: Callable[..., Any], items: Sequence[tuple[Any, ...]], budget_s: float) -> list[Score]:
    """Judge a batch by a reward's `score_many`. An item for which it gives something else than a score is `invalid`.

    Raises:
        NoScores: It raised, or did not give one result for each of several items. That of a single one is `invalid`.
        Late: It came back after its budget, `budget_s` for each item.
    """

    def called(given: Sequence[tuple[Any, ...]], budget_s: float) -> Any:
        found = many(given, budget_s)
        if isinstance(found, Mapping | str) or not isinstance(found, Iterable):
            return found
        return list(islice(found, len(items) + 1))  # a generator may have no end

    fault: Score | None = None
    begun = monotonic()
    try:
        results = _called(called, [_copied(item) for item in items], budget_s, budget_s=budget_s, items=len(items))
        if not isinstance(results, list):
            fault = _no_score(results, "a list of them from score_many, one for each item")
        elif len(results) != len(items):
            count = f"{len(results)}" if len(results) < len(items) else f"more than {len(items)}"
            fault = Score.invalid(f"score_many gave {count} results for {amount(len(items), 'item')}")
    except Late:
        raise
    except BaseException as error:  # sys.exit too: it would end this thread without a score
        fault = _raised(error, begun)
    if fault is None:
        return [_checked(each) for each in results]
    if len(items) > 1:
        raise NoScores(fault.details["reason"])
    return [fault]


def _checked(score: Any) -> Score:
    """Return a plain score of the same fields, or why it is none."""
    begun = monotonic()
    try:
        return _sound(score)
    except BaseException as error:
        return _raised(error, begun)


def _no_score(found: Any, cure: str = "for example Score.ok(0.5)") -> Score:
    """Return the score of a reward that has returned something else."""
    cure = "write def, not async def" if inspect.iscoroutine(found) else cure
    return Score.invalid(f"the reward returned {type(found).__name__}; it must return an agentrig.Score, {cure}")


def _called(reward: Callable[..., Any], *given: Any, budget_s: float, items: int = 1) -> Any:
    """Return what a reward returns. A coroutine, which nobody awaits, is closed: Python would warn of it.

    Only this call counts toward the budget: the copies that it gets, and the check of what it returns, do not.
    """
    begun = monotonic()
    try:
        with forks_ended("the reward"):
            made = reward(*given)
    finally:
        took = monotonic() - begun
        restored("the reward")  # at once: other threads of this process need it
    if took > budget_s * items + GRACE_S:
        raise Late(late_words(budget_s))
    if inspect.iscoroutine(made):
        made.close()
    return made


def _sound(score: Any) -> Score:
    """Return a plain score of the same fields, each read once and checked: nothing else reads what a reward returned.

    Its fields may have been changed since it was made, or change whenever they are read. Its names and details become
    JSON values, and its numbers plain ones, so that it counts the same in this process and in another one.
    """
    if not isinstance(score, Score):
        return _no_score(score)
    found = Score(**{field.name: getattr(score, field.name) for field in attrs.fields(Score)})
    try:
        text = json_text(plain_values(found.details, room=Room(DETAILS_LIMIT)))
        if len(text) > DETAILS_LIMIT:
            raise TooLong
    except TooLong:
        return Score.invalid(f"the details of its score are longer than the {DETAILS_LIMIT} characters of JSON allowed")
    return attrs.evolve(
        found,
        value=None if found.value is None else float(found.value),
        components={str(name): float(part) for name, part in found.components.items()},
        calls=[None if call is None else float(call) for call in found.calls],
        details=json.loads(text),
    )


def _copied(item: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return copies for a reward: what it changes must not change the record, or other rollouts of the task."""
    task, outcome, *traces = item

    def spans(trace: Trace) -> tuple[Span, ...]:
        return tuple(attrs.evolve(s, attributes=copied(s.attributes), otel=copied(s.otel)) for s in trace.spans)

    return (
        attrs.evolve(task, input=copied(task.input), private=copied(task.private), row=copied(task.row)),
        attrs.evolve(outcome, answer=copied(outcome.answer)),
        *(attrs.evolve(trace, spans=spans(trace)) for trace in traces),
    )


def _raised(error: BaseException, begun: float, **task: Any) -> Score:
    """Return the score of a reward that raised; what it had broken since it began is named, for it may be why."""
    restored("the reward")
    words = f"{words_of(error)}{place_of(error)}{field_hint(error, **task)}"
    return Score.invalid(f"the reward raised {words}{restored_since(begun)}")


def late_words(budget_s: float) -> str:
    """Return the reason of `late`."""
    return f"the reward ran past its budget of {budget_s:g} s"


def alone_words(count: int, reason: str) -> str:
    """Say that a batch of so many outcomes gave no scores, and what becomes of them."""
    return f"no scores for {amount(count, 'outcome')} at once, and each is judged alone: {reason}"
