"""The runners `lightning`: processes of this machine, and runners that join through Agent Lightning's store.

What a run submits goes into the store; whoever has room takes it, here or elsewhere.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from agentrig.endpoints import Endpoint
from agentrig.gateway.process import Gateway
from agentrig.pools import AgentSource, Job, Result
from agentrig.runners.processes import Pool
from agentrig.secrets import sources
from agentrig_lightning.joining import LightningRunners, address_of, checked_token, with_roles
from agentrig_lightning.resources import lightning_llm, templates_of
from agentrig_lightning.store import OWN_ID, Store
from agentrig_lightning.store_runner import StoreRunner
from agentrig_lightning.store_server import ServedStore

ROOM = 1 << 20
"""Most jobs that wait in the store: nobody knows how many runners will join."""


class StorePool:
    """Runner processes of this machine, and a store at which others join; see `agentrig.pools.RunnerPool`.

    Attributes:
        store: The store.
    """

    def __init__(
        self,
        plan: AgentSource,
        *,
        n: int,
        threads: int,
        deadline_s: float,
        retries: int,
        preload: Iterable[str] = (),
        settings: LightningRunners,
    ) -> None:
        settings = with_roles(attrs.evolve(settings, n=n), os.environ)
        limits: dict[str, Any] = {"deadline_s": deadline_s, "retries": retries}
        self._processes = Pool(plan, n=settings.n, threads=threads, preload=preload, **limits)
        self.store = Store()
        agent = {
            "name": plan.name,
            "config": sources(getattr(plan, "config", {})),
            "plugins": [Path(f).name for f in plan.files],
        }
        self._served = ServedStore(
            self.store,
            address=address_of(settings.store),
            token=checked_token(settings.store_token),
            silent_s=settings.lease_s,
            offer={"agent": agent, **limits},
        )
        self._runner = StoreRunner(self.store, self._processes, self._finished, served=self._served)
        self._submitted: deque[Job] = deque()
        self._ended: list[Result] = []
        self._old: list[str] = []
        self._resources: dict[str, str] = {}
        self._broke: Callable[[Exception], None] | None = None
        self._loop = asyncio.new_event_loop()

    def __getattr__(self, name: str) -> Any:
        if name in ("n", "deadline_s", "retries", "replaced", "processes", "wake"):
            return getattr(self._processes, name)
        raise AttributeError(name)

    @property
    def built(self) -> threading.Event:
        """Set once a process of this machine has built the agent."""
        return self._processes.built

    @built.setter
    def built(self, event: threading.Event) -> None:
        self._processes.built = event

    @property
    def pending(self) -> int:
        """Number of jobs that have not come back."""
        return len(self._submitted) + len(self._runner.jobs)

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
        return self._served.warnings

    def build_first(self, timeout_s: float) -> bool:
        """Build the agent in a process of this machine, if there are any."""
        return self._processes.build_first(timeout_s) if self._processes.n else False

    def start(self) -> None:
        """Serve the store, and start the processes of this machine."""
        if not self._served.url:
            self._served.start()
        self._processes.start()

    def submit(self, job: Job) -> None:
        """Queue a job."""
        self._submitted.append(job)

    def attach(
        self,
        judge: Callable[[Result, Any], float | None],
        broke: Callable[[Exception], None],
        gateway: Gateway | None,
    ) -> None:
        """Let an algorithm enqueue rollouts in the store itself.

        Args:
            judge: Called with every result and its rollout; returns the reward to store.
            broke: Called with the error if the store or a runner breaks; the algorithm gets it from the store.
            gateway: The run's gateway, for what the algorithm enqueues.
        """
        self._runner.finished, self._broke, self._runner.gateway = judge, broke, gateway

    def poll(self, timeout_s: float) -> list[Result]:
        """Pass jobs to whoever has room, wait for events, and return the finished results."""
        try:
            self._loop.run_until_complete(self._turn(timeout_s))
        except Exception as error:
            named = self._loop.run_until_complete(self._runner.broke(error))
            if self._broke is not None:
                self._broke(named)
            raise named from error.__cause__
        found, self._ended = self._ended, []
        return found

    def close(self) -> None:
        """Tell the runners that the run has ended, and end those of this machine."""
        self._processes.close()
        self._runner.end()
        self._served.stop()
        if not self._loop.is_closed() and not self._loop.is_running():
            self._loop.close()

    async def _turn(self, timeout_s: float) -> None:
        if self._old and not self._runner.jobs:  # what the last batch left: the dashboard has shown it until now
            await self.store.forget(self._old)
            self._old.clear()
        while self._submitted:
            job = self._submitted.popleft()
            self._runner.jobs[job.id] = job
            await self.store.enqueue_rollout(
                input=job.input,
                mode=job.mode,
                resources_id=await self._resource(job.endpoint, job.prompts),
                metadata={**(job.metadata or {}), OWN_ID: job.id},
            )
        await self._runner.turn(timeout_s)

    async def _resource(self, endpoint: Endpoint, prompts: Mapping[str, str]) -> str:
        key = repr((endpoint, endpoint.api_key, prompts))
        if key not in self._resources:
            # The first one, and that of this name, is for Agent Lightning's own runners.
            resources: Any = {"main_llm": lightning_llm(endpoint, own_fields=False), "llm": lightning_llm(endpoint)}
            resources = {**templates_of(prompts), **resources}
            self._resources[key] = (await self.store.add_resources(resources)).resources_id
        return self._resources[key]

    def _finished(self, result: Result, rollout: Any) -> None:
        if self._runner.jobs.pop(result.id, None) is not None:
            self._ended.append(result)
            self._old.append(result.id)
