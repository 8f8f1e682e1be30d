"""Credits that lack one property each; `fine` has all."""

from __future__ import annotations

from agentrig import CreditSpec, hookimpl

MADE: list[int] = []


def fine(groups):
    """Give each rollout its reward over the group's mean."""
    for group in groups:
        values = [r.value for r in group if r.value is not None]
        mean = sum(values) / max(len(values), 1)
        yield [None if r.value is None else r.value - mean for r in group]


def forgets_failures(groups):
    return [[r.value for r in group if r.value is not None] for group in groups]


def divides(groups):
    for group in groups:
        values = [r.value for r in group if r.value is not None]
        yield [None if r.value is None else r.value / (max(values) - min(values)) for r in group]


def counts(groups):
    MADE.append(1)
    return [[w and w * len(MADE) for w in worths] for worths in fine(groups)]


BROKEN = {
    "worths": forgets_failures,
    "worths-division": divides,
    "learns": lambda groups: [[0.0] * len(group) for group in groups],
    "better-is-not-worth-less": lambda groups: [[w and -w for w in worths] for worths in fine(groups)],
    "same-twice": counts,
}


@hookimpl
def register_credits():
    yield CreditSpec(name="loads", summary="Broken.", build=lambda config: 1 / 0)
    for name, credit in {"fine": fine, **BROKEN}.items():
        yield CreditSpec(name=name, summary="Broken.", build=lambda config, credit=credit: credit)
