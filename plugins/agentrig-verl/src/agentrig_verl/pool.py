"""Where runners run: processes of this machine, or Ray actors spread over a cluster's CPUs."""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from agentrig.errors import AgentrigError
from agentrig.processes.confine import RAY, confine, declared, withheld
from agentrig.runners.attempt import packed, running_loop
from agentrig.runners.jobs import AgentPlan, Job, Result
from agentrig.runners.pools import READY_S, BasePool, Worker
from agentrig.runners.processes import Pool

log = logging.getLogger(__name__)

SLICE_S = 0.02
"""Longest single wait for Ray, in seconds. Jobs and wake-ups from other threads are seen after it."""


class Runner:
    """Lives in a Ray actor: builds the agent once, then runs rollouts, each in its own thread."""

    def __init__(self, plan: AgentPlan, variables: Mapping[str, str], absent: Sequence[str]) -> None:
        confine((*RAY, *plan.environment), variables, absent)
        self._agent = plan.build()
        self._loop = running_loop()

    def ready(self) -> str:
        """Return the node that it runs on, once the agent is built."""
        import ray

        return str(ray.util.get_node_ip_address())

    def run(self, job: Job) -> bytes:
        """Run a rollout and return its pickled result; failures come back typed."""
        return packed(self._agent, job, self._loop)


@attrs.define(eq=False)
class _Actor(Worker):
    handle: Any
    ready_ref: Any
    node: str = ""
    refs: list[Any] = attrs.field(factory=list)


class RayPool(BasePool[_Actor]):
    """`agentrig.runners.processes.Pool` on Ray: the same contract, with actors instead of processes.

    Args:
        plan: The agent.
        cpus: CPUs that an actor requests from Ray.
        preload: Not used: an actor imports on its own.
        environment: Variables set in the actors before the agent is built, in addition to those that `plan` allows.
        **limits: `n`, `threads`, `deadline_s` and `retries`, as `BasePool` has them.
    """

    def __init__(
        self,
        plan: AgentPlan,
        *,
        cpus: float = 0.5,
        preload: object = (),
        environment: Mapping[str, str] | None = None,
        **limits: Any,
    ) -> None:
        super().__init__(plan, **limits)
        self._variables = {**declared(plan.environment), **(environment or {})}  # the base is each node's own
        self._cpus = cpus
        self._woken = threading.Event()

    @property
    def nodes(self) -> list[str]:
        """The nodes of the actors that are ready."""
        return [a.node for a in self._workers if a.ready]

    def wake(self) -> None:
        """Make a `poll` that waits in another thread return."""
        self._woken.set()

    def poll(self, timeout_s: float) -> list[Result]:
        """Send jobs, wait for events in short intervals, and return finished results."""
        end = time.monotonic() + timeout_s
        while True:
            woken = self._woken.is_set()
            results = super().poll(0.0 if woken else max(0.0, min(SLICE_S, end - time.monotonic())))
            if results or woken or time.monotonic() >= end:
                self._woken.clear()
                return results

    def _spawn(self) -> _Actor:
        import ray

        # max_restarts stays 0: this pool replaces actors itself, so that lost rollouts are counted.
        remote = ray.remote(Runner).options(
            num_cpus=self._cpus, max_concurrency=self._threads + 1, scheduling_strategy="SPREAD"
        )
        handle = remote.remote(self._plan, self._variables, withheld(self._plan.environment))
        return _Actor(handle, handle.ready.remote(), title="a runner on (no node yet)")

    def _kill(self, worker: _Actor) -> None:
        import ray

        ray.kill(worker.handle)

    def _send(self, worker: _Actor, job: Job) -> bool:
        worker.refs.append(worker.handle.run.remote(job))
        return True  # a dead actor shows when its reference is read

    def _listen(self, timeout_s: float) -> list[Result]:
        import ray

        owners = {ref: a for a in self._workers for ref in (a.refs if a.ready else [a.ready_ref])}
        if not owners:
            time.sleep(timeout_s)
            return []
        done, _ = ray.wait(list(owners), num_returns=1, timeout=timeout_s, fetch_local=False)
        if done:
            done, _ = ray.wait(list(owners), num_returns=len(owners), timeout=0, fetch_local=False)
        # Values before errors: rollouts that ended before their actor died count.
        taken = sorted(((owners[ref], ref, _taken(ref)) for ref in done), key=lambda t: isinstance(t[2], Exception))
        return [r for actor, ref, value in taken if actor in self._workers for r in self._receive(actor, ref, value)]

    def _receive(self, actor: _Actor, ref: Any, value: Any) -> list[Result]:
        """Handle a reference's value: readiness, a result, or the error of a dead actor."""
        from ray.exceptions import ActorUnschedulableError, RayTaskError

        if isinstance(value, RayTaskError):
            # packed raises nothing, so the error is from the actor's constructor or from unpickling
            raise AgentrigError(f"a runner of agent {self._plan.name} broke: {value}") from value
        if isinstance(value, ActorUnschedulableError):
            raise AgentrigError(f"Ray cannot schedule a runner ({self._cpus} CPUs): {value}") from value
        if isinstance(value, Exception):
            self._kill(actor)  # when a node is lost, its results are lost before Ray reports the actor as dead
            return self._died(actor, value)
        if ref == actor.ready_ref:
            actor.node, actor.title = value, f"a runner on {value}"
            self._built(actor)
            return []
        actor.refs.remove(ref)
        return self._ended(actor, pickle.loads(value))

    def _died(self, actor: _Actor, error: Exception) -> list[Result]:
        """Remove a dead actor. Its rollouts start again or fail, with the first line of Ray's error."""
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        failed = self._remove_dead(
            actor, early=f": {error}", died=lambda times: f"the runner died {times} times: {reason}"
        )
        again = len(actor.jobs) - len(failed)
        log.warning("%s died; %d rollouts start again, %d failed: %s", actor.title, again, len(failed), reason)
        return failed

    def _not_built(self) -> str:
        import ray

        free, total = (r.get("CPU", 0.0) for r in (ray.available_resources(), ray.cluster_resources()))
        return (
            f"a runner has waited {READY_S:g} s for {self._cpus} CPUs (of {total:g} in the cluster, {free:g} are free) "
            "or to build its agent: lower runners.n or algorithm.runner_cpus, or give the cluster more CPUs"
        )


def _taken(ref: Any) -> Any:
    """Return a reference's value, or the error of an actor that failed, died or cannot be scheduled."""
    import ray
    from ray.exceptions import ActorUnschedulableError, ObjectLostError, RayActorError, RayTaskError

    try:
        return ray.get(ref)
    except (ActorUnschedulableError, ObjectLostError, RayActorError, RayTaskError) as error:
        return error


class PlacedPool:
    """A pool whose runners start after the algorithm has joined Ray.

    Agent Lightning's trainer starts the runners before the algorithm, but Ray needs its environment first.
    """

    def __init__(self, plan: AgentPlan, **settings: Any) -> None:
        self._plan, self._settings = plan, settings
        self.built = threading.Event()
        self._inner: Pool | RayPool | None = None
        self._waiting: deque[Job] = deque()
        self._polling = threading.Lock()

    def place(self, on_ray: bool, *, cpus: float) -> None:
        """Start the runners, as Ray actors or as local processes."""
        inner = RayPool(self._plan, cpus=cpus, **self._settings) if on_ray else Pool(self._plan, **self._settings)
        inner.built = self.built
        inner.start()
        self._inner = inner

    def start(self) -> None:
        """Do nothing: `place` starts the runners."""

    @property
    def n(self) -> int:
        """Number of runners, also before they start."""
        return int(self._settings["n"])

    @property
    def deadline_s(self) -> float:
        """Time limit of a rollout in seconds."""
        return float(self._settings["deadline_s"])

    @property
    def retries(self) -> int:
        """How often a rollout starts again after its runner died."""
        return int(self._settings["retries"])

    @property
    def room(self) -> int:
        """How many more jobs could start at once."""
        inner = self._inner  # read once, here and below: another thread may call `withdraw`
        return inner.room - len(self._waiting) if inner else 0

    @property
    def pending(self) -> int:
        """Jobs that were submitted and have not come back."""
        inner = self._inner
        return (inner.pending if inner else 0) + len(self._waiting)

    @property
    def replaced(self) -> int:
        """How many runners were replaced."""
        inner = self._inner
        return inner.replaced if inner else 0

    def submit(self, job: Job) -> None:
        """Queue a job."""
        inner = self._inner
        if inner:
            inner.submit(job)
        else:
            self._waiting.append(job)

    def wake(self) -> None:
        """Make a `poll` that waits in another thread return."""
        inner = self._inner
        if inner:
            inner.wake()

    def processes(self) -> list[int]:
        """Return the process ids of the runners on this machine."""
        inner = self._inner
        return inner.processes() if inner else []

    def poll(self, timeout_s: float) -> list[Result]:
        """Send jobs, wait, and return finished results."""
        with self._polling:
            if self._inner is not None:
                while self._waiting:
                    self._inner.submit(self._waiting.popleft())
                return self._inner.poll(timeout_s)
        time.sleep(timeout_s)
        return []

    def withdraw(self) -> None:
        """Stop the runners before Ray shuts down. Safe from any thread."""
        with self._polling:
            inner, self._inner = self._inner, None
            if inner:
                inner.close()

    def close(self) -> None:
        """End all runners."""
        self.withdraw()
