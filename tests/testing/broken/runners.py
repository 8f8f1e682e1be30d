"""Runners with one fault each, named as the check that finds it; `fine` has none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import attrs

from agentrig import RunnersSpec, hookimpl
from agentrig.errors import AgentrigError
from agentrig.pools import Job, Result
from agentrig.runners.processes import Pool


class Builds(Pool):
    """Keeps the reason to itself."""

    def build_first(self, timeout_s: float) -> bool:
        try:
            return super().build_first(timeout_s)
        except AgentrigError:
            return False

    def poll(self, timeout_s: float) -> list[Result]:
        try:
            return super().poll(timeout_s)
        except AgentrigError:
            return []


class ResultsOnce(Pool):
    """Returns results twice."""

    def poll(self, timeout_s: float) -> list[Result]:
        return super().poll(timeout_s) * 2


class SendsWholeJobs(Pool):
    """Loses what an algorithm stored with the rollout."""

    def submit(self, job: Job) -> None:
        super().submit(attrs.evolve(job, metadata=None))


class TypesFailures(Pool):
    """Ends the run with the first agent that raises."""

    def poll(self, timeout_s: float) -> list[Result]:
        results = super().poll(timeout_s)
        for result in results:
            if result.outcome.failure == "agent-error":
                raise AgentrigError(result.outcome.message)
        return results


class Counts(Pool):
    """Says that there is always room."""

    @property
    def room(self) -> int:
        return 99


class Wakes(Pool):
    """Does not wake."""

    def wake(self) -> None: ...


class LeavesNothing(Pool):
    """Ends its runners much later."""

    def close(self) -> None:
        later = threading.Timer(6.0, super().close)
        later.daemon = True
        later.start()


def hasty(plan: Any, *, deadline_s: float, **limits: Any) -> Pool:
    """Call a rollout that hangs a dead runner: it gives each one an hour, and is then asked in vain."""
    return Pool(plan, deadline_s=3600.0 if deadline_s < 100 else deadline_s, **limits)


class RepeatsLost(Pool):
    """Starts no rollout again."""

    def _runs_again(self, worker: Any, job: Job, *, late: bool) -> bool:
        return False


def leaky(plan: Any, **limits: Any) -> Pool:
    """Give runners a key of the run."""
    return Pool(plan, environment={"KIT_OF_RUNNERS_KEY": "secret"}, **limits)


def unmade(config: Any) -> Any:
    raise OSError("the cluster's client is missing")


MAKE: dict[str, Callable[..., Any]] = {
    "fine": Pool,
    "builds": Builds,
    "results-once": ResultsOnce,
    "sends-whole-jobs": SendsWholeJobs,
    "types-failures": TypesFailures,
    "keeps-keys": leaky,
    "counts": Counts,
    "wakes": Wakes,
    "keeps-deadlines": hasty,
    "repeats-lost": RepeatsLost,
    "leaves-nothing": LeavesNothing,
}


@hookimpl
def register_runners() -> Iterable[RunnersSpec]:
    yield RunnersSpec(name="loads", summary="Breaks loads.", build=unmade)
    for name, make in MAKE.items():
        yield RunnersSpec(name=name, summary=f"Breaks {name}.", build=lambda config, make=make: make)
