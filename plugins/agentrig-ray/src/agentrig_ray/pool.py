"""Runners as Ray actors: Ray places them on the cluster's nodes, this pool gives them rollouts.

The pool asks Ray for all its actors at once. Those that have room run; the others wait in Ray, which shows their
needs to its autoscaler and places them on nodes that join. An actor that dies, alone or with its node, is asked for
again, and its rollouts start again elsewhere.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from agentrig.endpoints import is_loopback
from agentrig.errors import AgentrigError
from agentrig.pools import AgentSource, Job, Result
from agentrig.processes.confine import declared, withheld
from agentrig.processes.families import MARK
from agentrig.runners.pools import READY_S, BasePool, Worker
from agentrig_ray import cluster
from agentrig_ray.actor import Place, Runner

log = logging.getLogger(__name__)

SLICE_S = 0.02
"""Longest single wait for Ray, in seconds. Jobs and wake-ups from other threads are seen after it."""

NODES_LOST = 8
"""How often a rollout may lose its node beside its `retries`: a rollout that takes nodes down must end some day."""

END_S = 5.0
"""Seconds that actors get to end what their agents started, before Ray kills them."""


@attrs.define(eq=False)
class Actor(Worker):
    """One actor: its handle, the reference of its readiness, its place, and its rollouts by their references."""

    handle: Any
    ready_ref: Any
    place: Place | None = None
    refs: dict[Any, str] = attrs.field(factory=dict)


class RayPool(BasePool[Actor]):
    """`agentrig.runners.processes.Pool` on Ray: the same contract, with actors instead of processes.

    Args:
        address: The cluster, as `agentrig_ray.cluster.join` takes it; it is joined when the first actor starts.
        cpus: CPUs that an actor requests from Ray.
        wait_s: Seconds until one actor must have a place and its agent.
        preload: Not used: an actor imports on its own.
        environment: Variables set in the actors before the agent is built, in addition to those that `plan` allows.
        **limits: `n`, `threads`, `deadline_s` and `retries`, as `BasePool` has them.
    """

    def __init__(
        self,
        plan: AgentSource,
        *,
        address: str = "",
        cpus: float = 0.5,
        resources: Mapping[str, float] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        wait_s: float = READY_S,
        logs: bool = False,
        preload: object = (),
        environment: Mapping[str, str] | None = None,
        **limits: Any,
    ) -> None:
        super().__init__(plan, **limits)
        self._variables = {**declared(plan.environment), **(environment or {})}  # the base is each node's own
        self._files = {path: Path(path).read_text("utf-8") for path in plan.files if Path(path).is_file()}
        self._address, self._logs, self._wait_s = address, logs, wait_s
        self._cpus, self._resources, self._runtime_env = cpus, dict(resources or {}), dict(runtime_env or {})
        self._woken = threading.Event()
        self._joined = False
        self._here = ""
        self._nodes_lost: Counter[str] = Counter()

    @property
    def nodes(self) -> list[str]:
        """The address of each ready actor's node."""
        return [a.place.ip for a in self._workers if a.place is not None]

    @property
    def room(self) -> int:
        """How many more jobs could start now, on the actors that have a place."""
        placed = sum(a.ready for a in self._workers)
        return (placed or self.n) * self._threads - self.pending

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

    def close(self) -> None:
        """End all actors and what their agents started; leave the cluster if this pool has joined it."""
        import ray

        if self._workers and ray.is_initialized():
            self._end(self._workers)
        self._workers.clear()
        super().close()
        if self._joined:
            self._joined = False
            ray.shutdown()

    def _spawn(self) -> Actor:
        import ray

        if not self._here:
            self._joined = cluster.join(self._address, logs=self._logs)
            self._here = str(ray.util.get_node_ip_address())
        # max_restarts stays 0: this pool replaces actors itself, so that lost rollouts are counted.
        remote = ray.remote(Runner).options(
            num_cpus=self._cpus,
            resources=self._resources or None,
            runtime_env=self._runtime_env or None,
            max_concurrency=self._threads + 2,  # beside rollouts: `ready` and `end`
            scheduling_strategy="SPREAD",
        )
        variables = {**self._variables, MARK: uuid.uuid4().hex}
        handle = remote.remote(self._plan, variables, withheld(self._plan.environment), self._files)
        return Actor(handle, handle.ready.remote(), title="a runner without a node yet")

    def _kill(self, worker: Actor) -> None:
        self._end([worker])

    def _end(self, actors: list[Actor]) -> None:
        import ray

        asked = [a.handle.end.remote() for a in actors if a.place is not None]
        if asked:
            ray.wait(asked, num_returns=len(asked), timeout=END_S, fetch_local=False)
        for actor in actors:
            ray.kill(actor.handle)

    def _send(self, worker: Actor, job: Job) -> bool:
        assert worker.place is not None
        if worker.place.ip != self._here and is_loopback(job.endpoint.reached_at):
            what, key = job.endpoint.way
            raise AgentrigError(
                f"the {what} listens on {job.endpoint.reached_at}, which only this machine reaches, and a runner "
                f"is on the node {worker.place.ip}: let it listen on an address that the nodes reach "
                f"({key}={self._here}), or keep runners on this machine (--runners processes)"
            )
        worker.refs[worker.handle.run.remote(job)] = job.id
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

    def _receive(self, actor: Actor, ref: Any, value: Any) -> list[Result]:
        """Handle a reference's value: readiness, a result, or the error of a dead actor."""
        from ray.exceptions import ActorUnschedulableError, RayTaskError, RuntimeEnvSetupError

        if isinstance(value, RayTaskError):
            # packed raises nothing, so the error is from the actor's constructor or from unpickling
            raise AgentrigError(f"a runner of agent {self._plan.name} broke: {value}") from value
        if isinstance(value, ActorUnschedulableError | RuntimeEnvSetupError):
            raise AgentrigError(f"Ray cannot place a runner ({self._asked()}): {value}") from value
        if isinstance(value, Exception):
            return self._died(actor, value)
        if ref != actor.ready_ref:
            job_id = actor.refs.pop(ref)
            self._nodes_lost.pop(job_id, None)
            if job_id not in actor.jobs:
                return []  # it has failed before
            job, started = actor.jobs[job_id]
            try:
                result = Result.unpacked(job_id, value)
            except ValueError as broken:
                result = job.failed("infrastructure", str(broken), started)
            return self._ended(actor, result)
        if isinstance(value, str):
            raise AgentrigError(value)
        actor.place, actor.title = value, f"the runner on {value.ip}"
        self._built(actor)
        log.info("a runner is ready on %s; %d of %d", value.ip, len(self.nodes), self.n)
        return []

    def _died(self, actor: Actor, error: Exception) -> list[Result]:
        """Remove a dead actor. Its rollouts start again or fail, with the first line of Ray's error.

        A rollout whose node left did nothing wrong: that does not count towards its `retries`.
        """
        import ray

        ray.kill(actor.handle)  # when a node is lost, its results are lost before Ray reports the actor as dead
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        left = self._has_left(actor, error)
        spared = []
        for job_id in list(actor.jobs) if left else []:
            self._nodes_lost[job_id] += 1
            if self._nodes_lost[job_id] <= NODES_LOST:
                spared.append(actor.jobs.pop(job_id)[0].again())
        failed = self._remove_dead(actor, early=f": {error}", died="the runner died", why=f": {reason}")
        self._waiting.extendleft(spared)
        again = len(actor.jobs) - len(failed) + len(spared)
        how = "was lost with its node" if left else "died"
        log.warning("%s %s; %d rollouts start again, %d failed: %s", actor.title, how, again, len(failed), reason)
        return failed

    def _has_left(self, actor: Actor, error: Exception) -> bool:
        """Whether an actor is gone because its node is, or can't be reached; else its own process has died.

        The death of a process is told by the Ray of its node. A connection that breaks without that is the node's.
        """
        import ray
        from ray.exceptions import ActorDiedError

        if actor.place is None:
            return False
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        return not isinstance(error, ActorDiedError) or actor.place.node not in alive

    def _check_built(self, now: float) -> None:
        """Raise `AgentrigError` if no actor gets a place and its agent; if one has, the others may wait for nodes."""
        if self._workers and not any(a.ready or now - a.created <= self._wait_s for a in self._workers):
            raise AgentrigError(self._not_built())

    def _asked(self) -> str:
        more = [f"{amount:g} {name}" for name, amount in self._resources.items()]
        return ", ".join([f"{self._cpus:g} CPUs", *more])

    def _not_built(self) -> str:
        import ray

        free, total = (r.get("CPU", 0.0) for r in (ray.available_resources(), ray.cluster_resources()))
        return (
            f"no runner has had a place ({self._asked()}) and built its agent within {self._wait_s:g} s; of {total:g} "
            f"CPUs in the cluster, {free:g} are free. Lower what a runner requests (runners.cpus), wait longer "
            "(runners.wait_s), or give the cluster more nodes; `ray status` shows what waits"
        )


def _taken(ref: Any) -> Any:
    """Return a reference's value, or the error of an actor that failed, died or cannot be scheduled."""
    import ray
    from ray import exceptions as e

    try:
        return ray.get(ref)
    except (
        e.ActorUnschedulableError,
        e.NodeDiedError,
        e.ObjectLostError,
        e.RayActorError,
        e.RayTaskError,
        e.RuntimeEnvSetupError,
    ) as error:
        return error
