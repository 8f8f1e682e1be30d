"""The pool that waits until the algorithm places it; test_verl_cluster.py runs it on Ray."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from agentrig_verl.pool import PlacedPool

from agentrig import Endpoint
from agentrig.pools import Job
from agentrig.runners.jobs import AgentPlan


class Inner:
    room, pending, replaced = 3, 2, 1

    def submit(self, job: Job) -> None: ...

    def wake(self) -> None: ...

    def processes(self) -> list[int]:
        return [7]


class Vanishing(PlacedPool):
    """Withdraws the runners after the first read, as another thread might."""

    looks = 0

    @property
    def _inner(self) -> Inner | None:
        self.looks += 1
        return Inner() if self.looks == 1 else None

    @_inner.setter
    def _inner(self, inner: Inner | None) -> None: ...


JOB = Job(id="a", input={}, endpoint=Endpoint(base_url="http://127.0.0.1:9/v1", model="m"))


@pytest.mark.parametrize(
    ("look", "expected"),
    [
        (lambda pool: pool.room, 3),
        (lambda pool: pool.pending, 2),
        (lambda pool: pool.replaced, 1),
        (lambda pool: pool.processes(), [7]),
        (lambda pool: pool.wake(), None),
        (lambda pool: pool.submit(JOB), None),
    ],
)
def test_runners_may_be_withdrawn_during_a_look(look: Callable[[PlacedPool], object], expected: object):
    assert look(Vanishing(AgentPlan(name="none", config={}))) == expected


def test_jobs_wait_until_the_pool_is_placed():
    pool = PlacedPool(AgentPlan(name="none", config={}))
    pool.submit(JOB)
    assert (pool.room, pool.pending, pool.replaced, pool.processes(), pool.poll(0.0)) == (0, 1, 0, [], [])
