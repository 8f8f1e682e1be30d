"""Moves the rollouts of Agent Lightning's store to a pool, and results back."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs
from agentlightning import Span as LightningSpan
from agentlightning.types import AttemptedRollout

from agentrig.agents import Outcome
from agentrig.errors import AgentrigError, place_of
from agentrig.gateway.process import Gateway
from agentrig.pools import Job, Result
from agentrig.runners.pools import counted
from agentrig.text import words_of
from agentrig_lightning.resources import NOWHERE, job_of
from agentrig_lightning.results import score_span
from agentrig_lightning.spans import final_reward, from_lightning, to_lightning
from agentrig_lightning.store import OWN_RUNNER, Arrival, Store
from agentrig_lightning.store_server import ServedStore

log = logging.getLogger(__name__)

FAILURES = {"timeout": "deadline", "unresponsive": "runner-died", "cancelled": "cancelled"}
"""The status of an attempt to the kind of its failure; others are `agent-error`."""

CHECK_S = 1.0
"""Seconds between two looks at what other runners hold."""

SAY_S = 30.0
"""Seconds between two messages that rollouts wait for a runner."""

SILENT_S = 30.0
"""Seconds without a sign of life after which a runner counts as lost, if no setting says."""


class StoreRunner:
    """The run's own runner of a store: keeps a pool busy, and files what other runners report.

    Args:
        store: The store.
        pool: Runs the agent: a `RunnerPool`, or what has its numbers, `room`, `submit`, `poll` and `wake`.
        finished: Called with every result and its rollout; a number that it returns is stored as the rollout's reward,
            as Agent Lightning's own algorithms expect it. Not called for an attempt after which the rollout's own
            configuration lets it run again.
        served: The store's server, if other runners can join.

    Attributes:
        jobs: The job of each rollout that a run itself has put into the store, by its id; the others have the
            resources that an algorithm of Agent Lightning gave them.
        gateway: The run's gateway, for those others.
    """

    def __init__(
        self,
        store: Store,
        pool: Any,
        finished: Callable[[Result, AttemptedRollout], float | None],
        served: ServedStore | None = None,
    ) -> None:
        self._store, self._pool = store, pool
        self.finished = finished
        self.jobs: dict[str, Job] = {}
        self.gateway: Gateway | None = None
        self._attempts: dict[str, AttemptedRollout] = {}
        self._served = served
        self._silent_s = served.silent_s if served is not None else SILENT_S
        self._lost: dict[str, int] = {}
        self._next_check = 0.0
        self._next_said = 0.0
        self._said_none = False
        store.arrived = pool.wake

    def end(self) -> None:
        """Take no more reports of other runners."""
        self._store.arrived = None
        for arrival in self._arrivals():
            arrival.filed.set_exception(ConnectionAbortedError("the run has ended"))

    async def broke(self, error: Exception) -> AgentrigError:
        """End the store, because `turn` has raised, and return the error: an algorithm that waits gets it too."""
        if not isinstance(error, AgentrigError):
            cause = error
            error = AgentrigError(f"the run's runner, or its store, failed: {words_of(cause)}{place_of(cause)}")
            error.__cause__ = cause
        try:
            await self._store.end(error)
        except Exception as second:  # the store itself may be what broke
            log.error("the store cannot be ended: %s", words_of(second))
        return error

    async def turn(self, wait_s: float) -> None:
        """Start what waits in the store, wait at most `wait_s` seconds for events, and file what has ended."""
        room = self._pool.room
        if room > 0:
            for attempted in await self._store.dequeue_many_rollouts(limit=room, worker_id=OWN_RUNNER):
                await self._start(attempted)
        for result in self._pool.poll(wait_s):
            await self._finish(result)
        for arrival in self._arrivals():
            await self._file(arrival)
        if time.monotonic() >= self._next_check:
            self._next_check = time.monotonic() + CHECK_S
            await self._check_others()

    def _arrivals(self) -> Iterator[Arrival]:
        while True:
            try:
                yield self._store.arrivals.get_nowait()
            except queue.Empty:
                return

    async def _start(self, attempted: AttemptedRollout) -> None:
        self._attempts[attempted.rollout_id] = attempted
        job = self.jobs.get(attempted.rollout_id)
        if job is None:
            own = attempted.resources_id
            resources = await self._store.get_resources_by_id(own) if own else None
            resources = resources or await self._store.get_latest_resources()
            if resources is None and not self._said_none:
                self._said_none = True
                log.warning(
                    "the algorithm has put no resources into the store (store.add_resources): the agent gets an LLM "
                    "that answers nothing"
                )
            job = job_of(attempted, resources)
            if self.gateway is not None and job.endpoint is not NOWHERE:
                job = attrs.evolve(job, endpoint=attrs.evolve(job.endpoint, gateway=self.gateway.address))
        self._pool.submit(job)

    async def _finish(self, result: Result) -> None:
        """Judge and file a result of the pool."""
        attempted = self._attempts.pop(result.id)
        if result.id in self._store.open:  # the store's health check may have ended it
            status: Any = "succeeded" if result.outcome.failure is None else "failed"
            await self._conclude(attempted, status, result, recorded=False)

    async def _file(self, arrival: Arrival) -> None:
        """Judge and file what another runner, or the store's health check, has reported."""
        attempted = arrival.attempted
        try:
            result = arrival.result or reported(attempted, arrival.status, await self._spans(attempted))
            if arrival.settled:
                self.finished(result, attempted)
            elif attempted.rollout_id in self._store.open:
                await self._conclude(attempted, arrival.status, result, recorded=arrival.result is None)
        except BaseException as error:
            arrival.filed.set_exception(ConnectionAbortedError(f"the run has ended: {error}"))
            raise
        arrival.filed.set_result(None)

    async def _spans(self, attempted: AttemptedRollout) -> list[LightningSpan]:
        return list(await self._store.query_spans(attempted.rollout_id, attempted.attempt.attempt_id))

    async def _conclude(self, attempted: AttemptedRollout, status: Any, result: Result, *, recorded: bool) -> None:
        """Judge an attempt, store what is not yet stored (spans if not `recorded`), and make its end final."""
        attempt_id = attempted.attempt.attempt_id
        if self.gateway is not None and result.outcome.failure is not None and not result.trace.spans:
            result = attrs.evolve(result, trace=self.gateway.left(result.id) or result.trace)
        spans = [] if recorded else to_lightning(result.trace, result.id, attempt_id)
        again = await self._store.runs_again(attempted, status)
        reward = None if again else self.finished(result, attempted)
        there = await self._spans(attempted) if recorded else spans
        if reward is not None and reward != final_reward(there):  # the agent's own reward is among its spans
            number = max((span.sequence_id for span in there), default=0) + 1
            spans.append(score_span(float(reward), rollout_id=result.id, attempt_id=attempt_id, sequence_id=number))
        if spans:
            await self._store.add_many_spans(spans)
        await self._store.settle(attempted, status)
        if not again:
            self._lost.pop(result.id, None)

    async def _check_others(self) -> None:
        """Start the rollouts of runners that are gone again, and say when rollouts wait for a runner."""
        if self._served is not None:
            self._served.check()
        limit = self._pool.deadline_s + self._silent_s
        for lease, why in self._store.leases.overdue(silent_s=self._silent_s, deadline_s=limit):
            lost = self._lost[lease.rollout_id] = self._lost.get(lease.rollout_id, 0) + 1
            if lost <= self._pool.retries:
                log.warning("%s: rollout %s starts again", why, lease.rollout_id)
                await self._store.give_back(lease.rollout_id, lease.attempt_id)
                continue
            attempted = await self._store.get_rollout_by_id(lease.rollout_id)
            if attempted is None or lease.rollout_id not in self._store.open:
                self._store.leases.drop(lease.rollout_id)
                continue
            job = job_of(attempted, None)
            result = job.failed("runner-died", f"{why}{counted(lost)}", lease.taken)
            await self._conclude(attempted, "failed", result, recorded=True)
        queued = len(self._store.open) - self._pool.pending
        if self._pool.n or queued <= 0 or self._store.leases.workers(self._silent_s):
            return
        if time.monotonic() >= self._next_said:
            self._next_said = time.monotonic() + SAY_S
            how = self._served.how if self._served is not None else "start the run with --store HOST:PORT"
            log.warning("%d rollouts wait for a runner, the run has none itself (runners.n=0): %s", queued, how)


def reported(attempted: AttemptedRollout, status: str, spans: list[LightningSpan]) -> Result:
    """Return the result of an attempt of one of Agent Lightning's own runners: its spans, and the last reward in them.

    That number is the answer, as it is for an agent of Agent Lightning in a runner of agentrig.
    """
    attempt = attempted.attempt
    outcome = Outcome(answer=final_reward(spans))
    if status != "succeeded":
        kind = FAILURES.get(status, "agent-error")
        seen = [s.status.description for s in spans if s.status.status_code == "ERROR" and s.status.description]
        why = f": {seen[-1]}" if seen else "; the runner's own log says why"
        who = f"the runner {attempt.worker_id or '(unnamed)'}"
        outcome = Outcome(failure=kind, message=f"{who} reports the attempt as {status}{why}")
    return Result(
        id=attempted.rollout_id,
        outcome=outcome,
        trace=from_lightning(attempted.rollout_id, spans),
        start=attempt.start_time,
        duration_s=max(0.0, time.time() - attempt.start_time),
    )
