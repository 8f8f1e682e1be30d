"""The checks of a credit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from agentrig.credit import Credit, worths_of_calls
from agentrig.errors import AgentrigError
from agentrig.rewards import Score
from agentrig.rollouts import Rollout
from agentrig.testing.kit import basic
from agentrig.testing.run_directory import rollout_of
from agentrig.testing.subject import CheckFailed, Subject

VALUES: dict[str, Sequence[Sequence[float | None]]] = {
    "two groups that differ": [(1.0, 0.0, 0.5, 0.0), (0.25, 0.75, 1.0, 0.75)],
    "equal rewards": [(0.5, 0.5, 0.5)],
    "negative rewards": [(-3.0, -1.0, -2.0)],
    "failures": [(1.0, None, 0.0, None), (None, 0.5)],
    "nothing but failures": [(None, None)],
    "one rollout": [(1.0,)],
    "large rewards": [(1e9, -1e9, 0.0)],
    "no group": [],
    "mostly wrong": [(0.0, 1.0, 0.0, 0.0)],
    "half right": [(1.0, 0.0, 1.0, 0.0)],
    "mostly right": [(1.0, 1.0, 0.0, 1.0)],
    "mostly low": [(0.1, 0.3, 0.1, 0.1)],
    "mixed": [(0.2, 0.5, 0.8, 0.6)],
    "mostly high": [(0.9, 0.7, 0.8, 0.9)],
}
"""Steps: the rewards of the rollouts of each group; None for a failure."""

UNLIKE = ("mostly wrong", "half right", "mostly right", "mostly low", "mixed", "mostly high")
"""Of these steps, those of one group whose rewards differ as in runs: for right answers, or for parts of one."""


@attrs.define(kw_only=True, eq=False, slots=False)
class CreditSubject(Subject):
    """A credit."""

    def worths(self, step: str, credit: Credit | None = None) -> list[list[float | None]]:
        """Return what each call of one of the steps of `VALUES` is worth; the mean where each token has its own."""
        groups = enumerate(VALUES[step])
        rollouts = [_rollout(f"{g}-{i}", f"g{g}", v, i + 1) for g, values in groups for i, v in enumerate(values)]
        found = worths_of_calls(self.made if credit is None else credit, rollouts)
        return [[math.fsum(one) / len(one) if isinstance(one, Sequence) else one for one in calls] for calls in found]


def _rollout(name: str, group: str, value: float | None, calls: int) -> Rollout:
    """Return a rollout with some calls to train on, each of which is scored with the rollout's reward."""
    failure = "agent-error" if value is None else None
    made = rollout_of(0, right=True, mode="train", step=1, failure=failure, turns=calls)
    score = value if value is None else Score(status="ok", value=value, calls=[value] * len(made.trace.llm_calls()))
    triplets = [attrs.evolve(triplet, reward=None) for triplet in made.triplets]
    return attrs.evolve(made, id=name, group=group, score=score, triplets=triplets)


@basic
def check_worths(subject: CreditSubject) -> None:
    """It gives each rollout of each group a worth, in any step: with failures, equal rewards, one rollout, no group.

    Why: The run ends with an error in the first step that has such a group, after its rollouts were paid for.
    Cure: Yield a list for each group with a worth for each rollout: a finite number, one number for each of its
        triplets, or None to leave it out. A failure's value is None.
    """
    for step in VALUES:
        try:
            subject.worths(step)
        except AgentrigError as error:
            raise CheckFailed(f"a step with {step}: {error}") from error


def check_learns(subject: CreditSubject) -> str:
    """Where rewards differ, some call is worth more or less than 0; how many of such groups teach something is a fact.

    Why: Nothing is trained: the weights don't change, and the run ends.
    Cure: Give the better rollouts of a group a worth above 0, or the worse ones one below.
    """
    step = "two groups that differ"
    found = subject.worths(step)
    if not any(worth for calls in found for worth in calls):
        raise CheckFailed(f"rewards {VALUES[step]} are worth {found}")
    silent = [name for name in UNLIKE if not any(worth for calls in subject.worths(name) for worth in calls)]
    told = f"{len(UNLIKE) - len(silent)} of {len(UNLIKE)} made-up groups with unlike rewards teach something"
    if not silent:
        return told
    named = "; ".join(f"{name} ({', '.join(f'{value:g}' for value in VALUES[name][0])})" for name in silent)
    return f"{told}; nothing is learned from such as are {named}"


def check_better_is_not_worth_less(subject: CreditSubject) -> None:
    """In a group, a rollout with a higher reward is not worth less.

    Why: The model learns to do what the reward calls worse.
    Cure: Look at the sign: a worth above 0 makes what was sampled more likely.
    """
    for step, groups in VALUES.items():
        worths = iter(subject.worths(step))
        for values in groups:
            calls = [[worth or 0.0 for worth in next(worths)] or [0.0] for _ in values]
            means = [(v, math.fsum(of) / len(of)) for v, of in zip(values, calls, strict=True) if v is not None]
            for value, mean in means:
                for better, other in means:
                    if better > value and other < mean - 1e-9:
                        raise CheckFailed(f"the reward {value:g} is worth {mean:g}, and {better:g} is worth {other:g}")


def check_same_twice(subject: CreditSubject) -> None:
    """The same step gives the same worths again, also after others, and with a credit that is built again.

    Why: A resumed run and the auditor can't repeat a step.
    Cure: Let the worths depend on the groups and the settings only.
    """
    first = {step: subject.worths(step) for step in VALUES}
    for name, credit in (("again", subject.made), ("built again", subject.build())):
        for step, found in first.items():
            if (again := subject.worths(step, credit)) != found:
                raise CheckFailed(f"a step with {step}, {name}: {again} after {found}")
