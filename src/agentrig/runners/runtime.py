"""The integration with Agent Lightning 0.3: its Trainer, store and runner, around agentrig's pool of processes.

Agent Lightning's store keeps rollouts, attempts, spans and resources; its Trainer starts an algorithm
and a runner and shuts them down. The runner here is an Agent Lightning `Runner` that sends rollouts to a `Pool`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import attrs

from agentrig.endpoints import Endpoint
from agentrig.errors import AgentrigError
from agentrig.gateway.process import Gateway
from agentrig.lightning_import import import_lightning
from agentrig.pools import RunnerPool
from agentrig.processes.ends import Interrupted
from agentrig.runners.jobs import Result
from agentrig.runners.joining import Joining
from agentrig.text import words_of

import_lightning()  # before the imports below, which would bring litellm and its network calls

from agentlightning import (  # noqa: E402, TID253  (this module is itself imported lazily)
    Algorithm,
    EnqueueRolloutRequest,
    LitAgent,
    SharedMemoryExecutionStrategy,
    Trainer,
)
from agentlightning.types import AttemptedRollout  # noqa: E402, TID253

from agentrig.runners.lightning_resources import lightning_llm  # noqa: E402
from agentrig.runners.lightning_runner import PoolRunner  # noqa: E402
from agentrig.runners.lightning_store import Store  # noqa: E402
from agentrig.runners.lightning_tracer import RecorderTracer, SpanAdapter  # noqa: E402
from agentrig.runners.store_server import ServedStore  # noqa: E402

logging.getLogger("agentlightning").setLevel(logging.WARNING)
log = logging.getLogger(__name__)
T = TypeVar("T")

UNWIND_S = 5.0
"""Seconds that an interrupted body may take to shut down its server and other resources."""

SILENT_S = 30.0
"""Seconds without a sign of life after which a runner that joined by hand counts as lost, if no setting says."""

MODES = {"train": "train", "validation": "val", "report": "test", "dev": "val"}


class _Body(Algorithm):
    """Wraps a function as the algorithm of Agent Lightning's Trainer.

    It runs in a thread that can be abandoned, so that a thread that is stuck, for example in a server's start or an
    update, does not stop the run from ending.
    """

    def __init__(self, body: Callable[[], None]) -> None:
        super().__init__()
        self._body = body
        self._abandoned = False
        self._wake: Callable[[], None] = lambda: None
        self.thread = threading.Thread(target=self._guarded, name="algorithm", daemon=True)
        self.error: BaseException | None = None

    def is_async(self) -> bool:
        return True

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop of a body that has ended is closed
                loop.call_soon_threadsafe(ended.set)

        self._wake = wake
        if not self._abandoned:
            self.thread.start()
            await ended.wait()

    def abandon(self) -> None:
        """Stop waiting for the thread. Safe in a signal handler."""
        self._abandoned = True
        self._wake()

    def _guarded(self) -> None:
        try:
            self._body()
        except BaseException as error:
            self.error = error
        finally:
            self._wake()


class Runtime:
    """Agent Lightning's Trainer and store around a pool.

    Args:
        pool: Runs the agent; started and closed here.
        others: How runners outside this process join; None if they can't.
        gateway: The run's gateway; None if agents call the model's server themselves.

    Attributes:
        store: Agent Lightning's store.
        results: Finished results, in the order in which they finished; an exception if the pool broke.
        judge: Gets every result and its rollout in the runner's thread and returns the reward to store. With None,
            the initial value, results go into `results` instead.
    """

    def __init__(self, pool: RunnerPool, others: Joining | None = None, gateway: Gateway | None = None) -> None:
        self.pool = pool
        self.gateway = gateway
        self.store = Store()
        self.served = ServedStore(self.store, others) if others is not None else None
        self.results: queue.SimpleQueue[Result | Exception] = queue.SimpleQueue()
        self.judge: Callable[[Result, AttemptedRollout], float | None] | None = None
        self.trainer: Any = None
        self._resources: dict[str, str] = {}
        self._aborted: Interrupted | None = None
        self._failed: AgentrigError | None = None
        self._body: Any = None
        self._fitting = False

    @property
    def warnings(self) -> list[str]:
        """What the run's summary says of its runners: those that joined with another version."""
        return self.served.warnings if self.served is not None else []

    def run(self, body: Callable[[], None]) -> None:
        """Start the runners, call `body` in a thread, then shut everything down; raises what `body` raised."""
        algorithm = self._body = _Body(body)
        runner = PoolRunner(
            self.pool,
            self._judge,
            self._hand_over,
            self._broke,
            silent_s=self.served.joining.silent_s if self.served is not None else SILENT_S,
            how=lambda: self.served.how if self.served is not None else "start the run with --store HOST:PORT",
            still=self.served.check if self.served is not None else lambda: None,
            gateway=self.gateway,
            read=lambda: self.judge is not None or self.served is not None,
        )
        strategy = SharedMemoryExecutionStrategy(
            n_runners=1, main_thread="algorithm", managed_store=False, graceful_delay=0.5, join_timeout=5.0
        )
        self.trainer = Trainer(
            n_runners=1,
            algorithm=algorithm,
            runner=runner,
            strategy=strategy,
            store=self.store,
            tracer=RecorderTracer(),
            adapter=SpanAdapter(lambda trace: ()),
        )
        try:
            if self.served is not None:
                self.served.start()
            self.pool.start()
            self._fitting = True
            if self._aborted is None:
                self.trainer.fit(LitAgent())
        finally:
            self._fitting = False
            self.pool.close()
            if self.served is not None:
                self.served.stop()
        if self._aborted is not None:
            if algorithm.thread.is_alive():
                algorithm.thread.join(UNWIND_S)
            self._aborted.abandoned = algorithm.thread.is_alive()
            raise self._aborted
        if self._failed is not None and (self.judge is not None or algorithm.error is None):
            self._failed.abandoned = algorithm.thread.is_alive()
            raise self._failed
        if algorithm.error is not None:
            raise algorithm.error

    def abort(self, error: Interrupted) -> None:
        """Make `run` end immediately and raise that error; for a signal handler, in the thread of `run`."""
        self._aborted = error
        self.results.put(AgentrigError("the run was interrupted"))
        if not self._fitting:
            raise error
        self._body.abandon()

    def wait_for_agent(self) -> None:
        """Wait until a runner has built the agent; the pool has its own time limit.

        Raises:
            AgentrigError: It cannot be built, or the run was interrupted.
        """
        while self.pool.n and not self.pool.built.wait(0.05):
            if not self.results.empty():
                broken = self.results.get()
                if isinstance(broken, Exception):
                    raise broken

    def enqueue(self, inputs: Sequence[tuple[Any, Endpoint]], *, mode: str) -> list[str]:
        """Put rollouts into the store, each with its endpoint; return their ids, in order."""

        async def put() -> list[str]:
            requests = [
                EnqueueRolloutRequest(
                    input=dict(given) if isinstance(given, Mapping) else given,
                    mode=MODES[mode],
                    resources_id=await self._resource(self._through_gateway(endpoint)),
                )
                for given, endpoint in inputs
            ]
            return [r.rollout_id for r in await self.store.enqueue_many_rollouts(requests)]

        ids = self.call(put())
        self.pool.wake()
        return ids

    def _through_gateway(self, endpoint: Endpoint) -> Endpoint:
        return attrs.evolve(endpoint, gateway=self.gateway.address) if self.gateway is not None else endpoint

    async def _resource(self, endpoint: Endpoint) -> str:
        key = repr((endpoint, endpoint.api_key))
        if key not in self._resources:
            resources = {"llm": lightning_llm(endpoint)}
            if self.served is not None:  # the first one, and that of this name, is for Agent Lightning's own runners
                resources = {"main_llm": lightning_llm(endpoint, ours=False), **resources}
            self._resources[key] = (await self.store.add_resources(resources)).resources_id
        return self._resources[key]

    def resources(self, resources_id: str | None) -> Mapping[str, Any]:
        """Return the resources of that id; without one, the latest."""
        store = self.store
        found = self.call(store.get_resources_by_id(resources_id) if resources_id else store.get_latest_resources())
        return found.resources if found is not None else {}

    def unfinished(self, resources_id: str | None) -> int:
        """Return how many rollouts with these resources have not finished."""
        return sum(own == resources_id for own in list(self.store.open.values()))

    def forget(self, rollout_ids: Sequence[str]) -> None:
        """Delete finished rollouts from the store."""
        self.call(self.store.forget(rollout_ids))

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a store operation, in this thread or, where an event loop runs in it, in one of its own."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(coroutine)
        with ThreadPoolExecutor(1) as own:
            return own.submit(asyncio.run, coroutine).result()

    def _judge(self, result: Result, attempted: AttemptedRollout) -> float | None:
        return self.judge(result, attempted) if self.judge is not None else None

    def _hand_over(self, result: Result) -> None:
        if self.judge is None:
            self.results.put(result)

    async def _broke(self, error: AgentrigError) -> None:
        """End the run: its runner cannot continue. Runs in the runner's thread.

        The algorithm gets the error wherever it waits for rollouts: from the engine, or from the store. If it uses
        the store and does not end within `UNWIND_S`, the run ends without it.
        """
        self._failed = error
        self.results.put(error)
        try:
            await self.store.end(error)
        except Exception as second:  # the store itself may be what broke
            log.error("the store cannot be ended: %s", words_of(second))
        if self.judge is not None:
            end = time.monotonic() + UNWIND_S
            while self._body.thread.is_alive() and time.monotonic() < end:
                await asyncio.sleep(0.05)
            self._body.abandon()
