"""The pool of a run whose rollouts wait in Agent Lightning's store.

What a run submits, or an algorithm of Agent Lightning enqueues, goes into the store. Whoever has room takes it: the
run's own runners, or others that have joined. The run judges each result before its end is final in the store.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
from agentlightning import Span as LightningSpan
from agentlightning.types import AttemptedRollout

from agentrig.agents import Outcome
from agentrig.endpoints import Endpoint
from agentrig.errors import AgentrigError, place_of
from agentrig.pools import AgentSource, Job, Result
from agentrig.runners.pools import counted
from agentrig.runners.processes import Pool
from agentrig.runners.runtime import Runtime
from agentrig.secrets import sources
from agentrig.text import words_of
from agentrig_lightning.joining import LightningRunners, address_of, checked_token, with_roles
from agentrig_lightning.resources import NOWHERE, job_of, lightning_llm, templates_of
from agentrig_lightning.spans import final_reward, from_lightning, score_span, to_lightning
from agentrig_lightning.store import OWN_ID, OWN_RUNNER, Arrival, Store
from agentrig_lightning.store_server import ServedStore

log = logging.getLogger(__name__)

ROOM = 1 << 20
"""Most jobs that wait in the store: nobody knows how many runners will join."""

FAILURES = {"timeout": "deadline", "unresponsive": "runner-died", "cancelled": "cancelled"}
"""The status of an attempt to the kind of its failure; others are `agent-error`."""

CHECK_S = 1.0
"""Seconds between two looks at what other runners hold."""

SAY_S = 30.0
"""Seconds between two messages that rollouts wait for a runner."""

SILENT_S = 30.0
"""Seconds without a sign of life after which a runner counts as lost, if no setting says."""

Judge = Callable[[Result, AttemptedRollout], "float | None"]
"""Gets every result of an algorithm's rollout; returns the reward to store, as Agent Lightning's algorithms expect it.

Not called for an attempt after which the rollout's own configuration lets it run again."""


def serving_pool(
    plan: AgentSource,
    *,
    n: int,
    threads: int,
    deadline_s: float,
    retries: int,
    preload: Iterable[str] = (),
    settings: LightningRunners,
) -> StorePool:
    """Return the pool of the runners `lightning`: processes of this machine, and a store at which others join."""
    settings = with_roles(attrs.evolve(settings, n=n), os.environ)
    limits: dict[str, Any] = {"deadline_s": deadline_s, "retries": retries}
    agent = {
        "name": plan.name,
        "config": sources(getattr(plan, "config", {})),
        "plugins": [Path(f).name for f in plan.files],
    }
    store = Store()
    served = ServedStore(
        store,
        address=address_of(settings.store),
        token=checked_token(settings.store_token),
        silent_s=settings.lease_s,
        offer={"agent": agent, **limits},
    )
    return StorePool(Pool(plan, n=settings.n, threads=threads, preload=preload, **limits), store, served)


def store_pool(runtime: Runtime) -> StorePool:
    """Return the run's pool if it has a store; else one with a store of its own in front of the run's."""
    return runtime.pool if isinstance(runtime.pool, StorePool) else StorePool(runtime.pool, Store())


class StorePool:
    """A store in front of the run's own runners; see `agentrig.pools.RunnerPool`.

    Args:
        runners: Run the agent for the run itself: a `RunnerPool`.
        store: The store.
        served: The store's server, if other runners can join.
    """

    def __init__(self, runners: Any, store: Store, served: ServedStore | None = None) -> None:
        self.store, self._runners, self._served = store, runners, served
        self._silent_s = served.silent_s if served is not None else SILENT_S
        self._submitted: deque[Job] = deque()
        self._jobs: dict[str, Job] = {}  # what the run has submitted and the store has, by id
        self._results: list[Result] = []
        self._old: list[str] = []
        self._resources: dict[str, str] = {}
        self._attempts: dict[str, AttemptedRollout] = {}  # what the run's own runners have
        self._lost: dict[str, int] = {}
        self._judge: Judge | None = None
        self._runtime: Runtime | None = None  # while an algorithm plays
        self._next_check = self._next_said = 0.0
        self._said_none = False
        self._loop, self._turning = asyncio.new_event_loop(), threading.Lock()
        store.arrived = runners.wake

    def __getattr__(self, name: str) -> Any:
        if name in ("n", "deadline_s", "retries", "replaced", "processes", "wake"):
            return getattr(self._runners, name)
        raise AttributeError(name)

    @property
    def built(self) -> threading.Event:
        """Set once a process of this machine has built the agent."""
        built: threading.Event = self._runners.built
        return built

    @built.setter
    def built(self, event: threading.Event) -> None:
        self._runners.built = event

    @property
    def pending(self) -> int:
        """Number of jobs that have not come back."""
        return len(self._submitted) + len(self._jobs)

    @property
    def room(self) -> int:
        """How many more jobs the store takes."""
        return ROOM - self.pending

    @property
    def untouched(self) -> bool:
        """Whether jobs wait for runners from elsewhere, and none of the batch has begun."""
        return not self.n and self.pending > 0 and not self._old and not self.store.leases.held

    @property
    def warnings(self) -> Sequence[str]:
        """What the run's summary says of those who came."""
        return self._served.warnings if self._served is not None else ()

    def build_first(self, timeout_s: float) -> bool:
        """Build the agent in a process of this machine, if there are any."""
        return bool(self._runners.build_first(timeout_s)) if self.n else False

    def start(self) -> None:
        """Serve the store, and start the processes of this machine."""
        if self._served is not None and not self._served.url:
            self._served.start()
        self._runners.start()

    def submit(self, job: Job) -> None:
        """Queue a job."""
        self._submitted.append(job)

    @contextmanager
    def playing(self, runtime: Runtime, judge: Judge) -> Iterator[None]:
        """Run what an algorithm enqueues in the store while the block runs; this is the run's pool meanwhile.

        If the store or a runner breaks, or the run ends, the algorithm gets the error from the store.
        """
        before = runtime.pool
        self._judge, self._runtime = judge, runtime
        runtime.pool = self
        before.wake()
        try:
            yield
        finally:
            runtime.pool = before
            if before is not self:
                self.wake()
                with self._turning:  # the last turn has ended
                    self._take_no_more()
            self._judge = self._runtime = None

    def poll(self, timeout_s: float) -> list[Result]:
        """Start what waits in the store, wait for events, file what has ended, and return the run's own results."""
        with self._turning:
            try:
                self._loop.run_until_complete(self._turn(timeout_s))
            except Exception as error:
                named = self._loop.run_until_complete(self._broken(error))
                if self._runtime is not None:
                    self._runtime.abort(named)
                raise named from error.__cause__
            found, self._results = self._results, []
            return found

    def close(self) -> None:
        """Tell the runners that the run has ended, and end those of this machine."""
        if self._judge is not None and not self._loop.is_closed() and not self._loop.is_running():
            self._loop.run_until_complete(self.store.end(AgentrigError("the run was interrupted")))
        self._runners.close()
        if self._served is not None:
            self._served.stop()
        self._take_no_more()

    def _take_no_more(self) -> None:
        """Take no more reports of other runners."""
        self.store.arrived = None
        for arrival in self._arrivals():
            arrival.filed.set_exception(ConnectionAbortedError("the run has ended"))
        if not self._loop.is_closed() and not self._loop.is_running():
            self._loop.close()

    async def _broken(self, error: Exception) -> AgentrigError:
        """End the store, because a turn has raised, and return the error: an algorithm that waits gets it too."""
        if not isinstance(error, AgentrigError):
            cause = error
            error = AgentrigError(f"the run's runner, or its store, failed: {words_of(cause)}{place_of(cause)}")
            error.__cause__ = cause
        try:
            await self.store.end(error)
        except Exception as second:  # the store itself may be what broke
            log.error("the store cannot be ended: %s", words_of(second))
        return error

    async def _turn(self, timeout_s: float) -> None:
        if self._old and not self._jobs:  # what the last batch left: the dashboard has shown it until now
            await self.store.forget(self._old)
            self._old.clear()
        while self._submitted:
            job = self._submitted.popleft()
            self._jobs[job.id] = job
            await self.store.enqueue_rollout(
                input=job.input,
                mode=job.mode,
                resources_id=await self._resource(job.endpoint, job.prompts),
                metadata={**(job.metadata or {}), OWN_ID: job.id},
            )
        if (room := self._runners.room) > 0:
            for attempted in await self.store.dequeue_many_rollouts(limit=room, worker_id=OWN_RUNNER):
                await self._start(attempted)
        for result in self._runners.poll(timeout_s):
            await self._finish(result)
        for arrival in self._arrivals():
            await self._file(arrival)
        if time.monotonic() >= self._next_check:
            self._next_check = time.monotonic() + CHECK_S
            await self._check_others()

    async def _resource(self, endpoint: Endpoint, prompts: Mapping[str, str]) -> str:
        key = repr((endpoint, endpoint.api_key, prompts))
        if key not in self._resources:
            # The first one, and that of this name, is for Agent Lightning's own runners.
            resources: Any = {"main_llm": lightning_llm(endpoint, own_fields=False), "llm": lightning_llm(endpoint)}
            resources = {**templates_of(prompts), **resources}
            self._resources[key] = (await self.store.add_resources(resources)).resources_id
        return self._resources[key]

    def _arrivals(self) -> Iterator[Arrival]:
        while True:
            try:
                yield self.store.arrivals.get_nowait()
            except queue.Empty:
                return

    async def _start(self, attempted: AttemptedRollout) -> None:
        """Pass a rollout to the run's own runners; one of an algorithm has the resources that this gave it."""
        self._attempts[attempted.rollout_id] = attempted
        job = self._jobs.get(attempted.rollout_id)
        if job is None:
            own = attempted.resources_id
            resources = await self.store.get_resources_by_id(own) if own else None
            resources = resources or await self.store.get_latest_resources()
            if resources is None and not self._said_none:
                self._said_none = True
                log.warning(
                    "the algorithm has put no resources into the store (store.add_resources): the agent gets an LLM "
                    "that answers nothing"
                )
            job = job_of(attempted, resources)
            gateway = self._runtime.gateway if self._runtime is not None else None
            if gateway is not None and job.endpoint is not NOWHERE:
                job = attrs.evolve(job, endpoint=attrs.evolve(job.endpoint, gateway=gateway.address))
        self._runners.submit(job)

    async def _finish(self, result: Result) -> None:
        """Judge and file a result of the run's own runners."""
        attempted = self._attempts.pop(result.id)
        if result.id in self.store.open:  # the store's health check may have ended it
            status: Any = "succeeded" if result.outcome.failure is None else "failed"
            await self._conclude(attempted, status, result, recorded=False)

    async def _file(self, arrival: Arrival) -> None:
        """Judge and file what another runner, or the store's health check, has reported."""
        attempted = arrival.attempted
        try:
            result = arrival.result or _reported(attempted, arrival.status, await self._spans(attempted))
            if arrival.settled:
                self._judged(result, attempted)
            elif attempted.rollout_id in self.store.open:
                await self._conclude(attempted, arrival.status, result, recorded=arrival.result is None)
        except BaseException as error:
            arrival.filed.set_exception(ConnectionAbortedError(f"the run has ended: {error}"))
            raise
        arrival.filed.set_result(None)

    async def _spans(self, attempted: AttemptedRollout) -> list[LightningSpan]:
        return list(await self.store.query_spans(attempted.rollout_id, attempted.attempt.attempt_id))

    async def _conclude(self, attempted: AttemptedRollout, status: Any, result: Result, *, recorded: bool) -> None:
        """Judge an attempt, store what is not yet stored (spans if not `recorded`), and make its end final."""
        attempt_id = attempted.attempt.attempt_id
        gateway = self._runtime.gateway if self._runtime is not None else None
        if gateway is not None and result.outcome.failure is not None and not result.trace.spans:
            result = attrs.evolve(result, trace=gateway.left(result.id) or result.trace)
        spans = [] if recorded else to_lightning(result.trace, result.id, attempt_id)
        again = await self.store.runs_again(attempted, status)
        reward = None if again else self._judged(result, attempted)
        there = await self._spans(attempted) if recorded else spans
        if reward is not None and reward != final_reward(there):  # the agent's own reward is among its spans
            number = max((span.sequence_id for span in there), default=0) + 1
            spans.append(score_span(float(reward), rollout_id=result.id, attempt_id=attempt_id, sequence_id=number))
        if spans:
            await self.store.add_many_spans(spans)
        await self.store.settle(attempted, status)
        if not again:
            self._lost.pop(result.id, None)

    def _judged(self, result: Result, attempted: AttemptedRollout) -> float | None:
        """Keep a result of the run's own for `poll`; of another one, return what the algorithm's judge says."""
        if self._jobs.pop(result.id, None) is not None:
            self._results.append(result)
            self._old.append(result.id)
            return None
        return self._judge(result, attempted) if self._judge is not None else None

    async def _check_others(self) -> None:
        """Start the rollouts of runners that are gone again, and say when rollouts wait for a runner."""
        if self._served is not None:
            self._served.check()
        for lease, why in self.store.leases.overdue(
            silent_s=self._silent_s, deadline_s=self.deadline_s + self._silent_s
        ):
            lost = self._lost[lease.rollout_id] = self._lost.get(lease.rollout_id, 0) + 1
            if lost <= self.retries:
                log.warning("%s: rollout %s starts again", why, lease.rollout_id)
                await self.store.give_back(lease.rollout_id, lease.attempt_id)
                continue
            attempted = await self.store.get_rollout_by_id(lease.rollout_id)
            if attempted is None or lease.rollout_id not in self.store.open:
                self.store.leases.drop(lease.rollout_id)
                continue
            result = job_of(attempted, None).failed("runner-died", f"{why}{counted(lost)}", lease.taken)
            await self._conclude(attempted, "failed", result, recorded=True)
        queued = len(self.store.open) - self._runners.pending
        if self.n or queued <= 0 or self.store.leases.workers(self._silent_s):
            return
        if time.monotonic() >= self._next_said:
            self._next_said = time.monotonic() + SAY_S
            how = self._served.how if self._served is not None else "start the run with --store HOST:PORT"
            log.warning("%d rollouts wait for a runner, the run has none itself (runners.n=0): %s", queued, how)


def _reported(attempted: AttemptedRollout, status: str, spans: list[LightningSpan]) -> Result:
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
