"""Where runners run: processes of this machine, or Ray actors spread over a cluster's CPUs."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Any

import attrs

from agentrig.agents import Outcome
from agentrig.errors import AgentrigError
from agentrig.traces import Trace
from agentrig.workers import SPAWN_LIMIT, AgentPlan, Job, Pool, Result, run_agent, running_loop

log = logging.getLogger(__name__)

SLICE_S = 0.02
"""Longest wait for Ray in one go: what another thread submits or wakes is seen after it."""

READY_S = 300.0
"""How long a runner may wait for a place and build its agent."""


class Runner:
    """Lives in a Ray actor: builds the agent once, then runs rollouts, each in a thread of its own."""

    def __init__(self, plan: AgentPlan) -> None:
        self._agent = plan.build()
        self._loop = running_loop()

    def ready(self) -> str:
        """Return the node that it runs on, once the agent is built."""
        import ray

        return str(ray.util.get_node_ip_address())

    def run(self, job: Job) -> Result:
        """Run a rollout; failures come back typed."""
        return run_agent(self._agent, job, self._loop)


@attrs.define(eq=False)
class _Actor:
    handle: Any
    ready_ref: Any
    created: float
    node: str = ""
    jobs: dict[Any, tuple[Job, float]] = attrs.field(factory=dict)


class RayPool:
    """`agentrig.workers.Pool` on Ray: the same contract, with actors for processes.

    Args:
        plan: The agent.
        n: Actors, spread over the cluster's nodes.
        threads: Rollouts at once in each.
        deadline_s: Wall seconds for a rollout; an actor that holds an overdue one is killed.
        retries: How often a rollout is started again when its actor died; then it is `runner-died`.
        cpus: What an actor asks of Ray.
        **more: What else `Pool` takes (`preload`, `environment`): actors inherit the job's environment.
    """

    def __init__(
        self,
        plan: AgentPlan,
        *,
        n: int,
        threads: int,
        deadline_s: float,
        retries: int,
        cpus: float = 0.5,
        **more: Any,
    ) -> None:
        self._plan, self._n, self._threads = plan, n, threads
        self._deadline_s, self._retries, self._cpus = deadline_s, retries, cpus
        self._actors: list[_Actor] = []
        self._waiting: deque[Job] = deque()
        self._lost: dict[str, int] = {}
        self._died_early = 0
        self._woken = threading.Event()
        self.replaced = 0

    def start(self) -> None:
        """Start the actors that are missing; they build the agent on their own time."""
        import ray

        # max_restarts stays 0: this pool replaces actors itself, so that lost rollouts are counted.
        remote = ray.remote(Runner).options(
            num_cpus=self._cpus, max_concurrency=self._threads + 1, scheduling_strategy="SPREAD"
        )
        while len(self._actors) < self._n:
            handle = remote.remote(self._plan)
            self._actors.append(_Actor(handle=handle, ready_ref=handle.ready.remote(), created=time.monotonic()))

    @property
    def room(self) -> int:
        """How many more jobs could start at once."""
        return self._n * self._threads - self.pending

    @property
    def pending(self) -> int:
        """Jobs that were submitted and have not come back."""
        return sum(len(a.jobs) for a in self._actors) + len(self._waiting)

    @property
    def nodes(self) -> list[str]:
        """The nodes of the actors that are ready."""
        return [a.node for a in self._actors if a.node]

    def submit(self, job: Job) -> None:
        """Queue a job."""
        self._waiting.append(job)

    def wake(self) -> None:
        """Make a `poll` that waits in another thread return."""
        self._woken.set()

    def processes(self) -> list[int]:
        """Return the process ids of runners on this machine: none that the driver may touch."""
        return []

    def poll(self, timeout_s: float) -> list[Result]:
        """Hand out jobs, wait for something to happen, and return what has ended.

        Raises:
            AgentrigError: The agent cannot be built, or the cluster has no place for the runners.
        """
        import ray

        self._dispatch()
        end = time.monotonic() + timeout_s
        results: list[Result] = []
        while not results and not self._woken.is_set():
            refs = [a.ready_ref for a in self._actors if not a.node] + [r for a in self._actors for r in a.jobs]
            left = max(0.0, min(SLICE_S, end - time.monotonic()))
            if refs:
                done, _ = ray.wait(refs, num_returns=1, timeout=left, fetch_local=False)
                if done:
                    done, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
                for ref in done:
                    results += self._receive(ref)
            else:
                time.sleep(left)
            results += self._enforce_deadlines()
            self.start()
            self._dispatch()
            if time.monotonic() >= end:
                break
        self._woken.clear()
        return results

    def close(self) -> None:
        """End all runners; what they were doing is lost."""
        import ray

        for actor in self._actors:
            ray.kill(actor.handle)
        self._actors.clear()
        self._waiting.clear()

    def _dispatch(self) -> None:
        while self._waiting:
            idle = [a for a in self._actors if a.node and len(a.jobs) < self._threads]
            if not idle:
                return
            actor = min(idle, key=lambda a: len(a.jobs))
            job = self._waiting.popleft()
            actor.jobs[actor.handle.run.remote(job)] = (job, time.monotonic())

    def _receive(self, ref: Any) -> list[Result]:
        """Take what a reference holds: readiness, a result, or the actor's death."""
        import ray

        actor = next((a for a in self._actors if ref == a.ready_ref or ref in a.jobs), None)
        if actor is None:
            return []  # its actor was buried a moment ago
        try:
            value = ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            # run_agent lets nothing out: what raises is the actor's own constructor or its unpickling
            raise AgentrigError(f"a runner of agent {self._plan.name} broke: {error}") from error
        except ray.exceptions.ActorUnschedulableError as error:
            raise AgentrigError(f"Ray has no place for a runner ({self._cpus} CPUs): {error}") from error
        except ray.exceptions.RayActorError as error:
            return self._bury(actor, error)
        if ref == actor.ready_ref:
            actor.node = value
            self._died_early = 0
            return []
        job, _ = actor.jobs.pop(ref)
        self._lost.pop(job.id, None)
        return [value]

    def _bury(self, actor: _Actor, error: Exception) -> list[Result]:
        """Replace an actor that died; its rollouts start again, or fail once too often lost."""
        self._actors.remove(actor)
        self.replaced += 1
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if not actor.node:
            self._died_early += 1
            if self._died_early >= SPAWN_LIMIT:
                raise AgentrigError(f"runners of agent {self._plan.name} die before they have built it: {error}")
        failed = []
        for job, started in actor.jobs.values():
            lost = self._lost.get(job.id, 0) + 1
            if lost > self._retries:
                self._lost.pop(job.id, None)
                failed.append(_failed(job, "runner-died", f"the runner died {lost} times: {reason}", started))
            else:
                self._lost[job.id] = lost
                self._waiting.appendleft(job)
        log.warning(
            "a runner on %s died; %d rollouts start again, %d failed: %s",
            actor.node or "(no node yet)",
            len(actor.jobs) - len(failed),
            len(failed),
            reason,
        )
        return failed

    def _enforce_deadlines(self) -> list[Result]:
        import ray

        failed = []
        now = time.monotonic()
        for actor in list(self._actors):
            if not actor.node and now - actor.created > READY_S:
                raise AgentrigError(
                    f"a runner has waited {READY_S:g} s for a place ({self._cpus} CPUs of {_cpus(ray)}): "
                    "lower runners.n or algorithm.runner_cpus, or give the cluster more CPUs"
                )
            overdue = [ref for ref, (_, started) in actor.jobs.items() if now - started > self._deadline_s]
            if not overdue:
                continue
            ray.kill(actor.handle)
            for ref in overdue:
                job, started = actor.jobs.pop(ref)
                reason = f"the rollout ran past its deadline of {self._deadline_s:g} s and its runner was killed"
                failed.append(_failed(job, "deadline", reason, started))
                self._lost.pop(job.id, None)
            self._actors.remove(actor)
            self.replaced += 1
            for job, _ in actor.jobs.values():
                self._waiting.appendleft(job)  # innocent: not counted as lost
            log.warning("a runner on %s killed: %d rollouts past their deadline", actor.node, len(overdue))
        return failed


def _cpus(ray: Any) -> str:
    free, total = ray.available_resources().get("CPU", 0.0), ray.cluster_resources().get("CPU", 0.0)
    return f"{free:g} free and {total:g} in all"


def _failed(job: Job, kind: str, message: str, started: float) -> Result:
    duration = time.monotonic() - started
    return Result(
        id=job.id,
        outcome=Outcome(failure=kind, message=message),
        trace=Trace(rollout_id=job.id),
        start=time.time() - duration,
        duration_s=duration,
    )


class PlacedPool:
    """A pool that stands still until the algorithm has joined Ray and knows where its runners belong.

    Agent Lightning's trainer starts the runners before the algorithm; Ray wants its environment first.
    """

    def __init__(self, plan: AgentPlan, **settings: Any) -> None:
        self._plan, self._settings = plan, settings
        self._inner: Pool | RayPool | None = None
        self._waiting: deque[Job] = deque()

    def place(self, on_ray: bool, *, cpus: float) -> None:
        """Start the runners, as Ray actors or as local processes."""
        inner = RayPool(self._plan, cpus=cpus, **self._settings) if on_ray else Pool(self._plan, **self._settings)
        inner.start()
        self._inner = inner

    def start(self) -> None:
        """Nothing yet; see `place`."""

    @property
    def room(self) -> int:
        """How many more jobs could start at once."""
        return self._inner.room - len(self._waiting) if self._inner else 0

    @property
    def pending(self) -> int:
        """Jobs that were submitted and have not come back."""
        return (self._inner.pending if self._inner else 0) + len(self._waiting)

    @property
    def replaced(self) -> int:
        """How many runners were replaced."""
        return self._inner.replaced if self._inner else 0

    def submit(self, job: Job) -> None:
        """Queue a job."""
        if self._inner:
            self._inner.submit(job)
        else:
            self._waiting.append(job)

    def wake(self) -> None:
        """Make a `poll` that waits in another thread return."""
        if self._inner:
            self._inner.wake()

    def processes(self) -> list[int]:
        """Return the process ids of the runners on this machine."""
        return self._inner.processes() if self._inner else []

    def poll(self, timeout_s: float) -> list[Result]:
        """Hand out jobs, wait, and return what has ended."""
        if self._inner is None:
            time.sleep(timeout_s)
            return []
        while self._waiting:
            self._inner.submit(self._waiting.popleft())
        return self._inner.poll(timeout_s)

    def close(self) -> None:
        """End all runners."""
        if self._inner:
            self._inner.close()
