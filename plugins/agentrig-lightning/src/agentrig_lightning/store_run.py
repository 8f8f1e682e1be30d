"""The store of an algorithm of Agent Lightning: the run's own runners play what the algorithm enqueues there."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from agentlightning import SharedMemoryExecutionStrategy
from agentlightning import Trainer as LightningTrainer

from agentrig.pools import Job, Result
from agentrig.runners.runtime import Runtime
from agentrig_lightning.recorder_tracer import RecorderTracer
from agentrig_lightning.store import Store
from agentrig_lightning.store_runner import StoreRunner

T = TypeVar("T")

WAIT_S = 0.2
"""Seconds that the store's runner waits for an event."""

Judge = Callable[[Result, Any], float | None]


class RuntimeJobs:
    """The run's runtime as `StoreRunner` uses a pool: jobs go in, results come out."""

    def __init__(self, runtime: Runtime) -> None:
        pool = runtime.pool
        self.n, self.deadline_s, self.retries = pool.n, pool.deadline_s, pool.retries
        self.pending = 0
        self._runtime = runtime
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()

    @property
    def room(self) -> int:
        """How many more rollouts could start now: others wait in the store, where their time limits do not run."""
        return self._runtime.pool.room

    def submit(self, job: Job) -> None:
        """Pass a job on."""
        self.pending += 1
        self._runtime.submit([job], self._results)

    def wake(self) -> None:
        """Make `poll` return."""
        self._results.put(None)

    def poll(self, timeout_s: float) -> list[Result]:
        """Wait for a result; return all that are there.

        Raises:
            AgentrigError: The run's runners are broken, or the run ends.
        """
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self._results.get(timeout=timeout_s))
            while True:
                found.append(self._results.get_nowait())
        results = []
        for each in found:
            if isinstance(each, Exception):
                raise each
            if each is not None:
                self.pending -= 1
                results.append(each)
        return results


class StoreRun:
    """A store whose rollouts the run plays while the block runs.

    Args:
        runtime: The run's runtime. If its runners serve a store themselves, that one is used.

    Attributes:
        store: The store.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._ended = threading.Event()
        self.store: Store = getattr(runtime.pool, "store", None) or Store()

    @contextlib.contextmanager
    def playing(self, judge: Judge) -> Iterator[None]:
        """Run the agent on what is enqueued; `judge` gets every result and its rollout, and returns its reward."""
        attach = getattr(self._runtime.pool, "attach", None)
        if attach is not None:
            attach(judge, self._runtime.abort, self._runtime.gateway)
            yield
            return
        runner = StoreRunner(self.store, RuntimeJobs(self._runtime), judge)  # type: ignore[arg-type]
        thread = threading.Thread(target=lambda: asyncio.run(self._play(runner)), name="store", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    async def _play(self, runner: StoreRunner) -> None:
        try:
            while not self._ended.is_set():
                await runner.turn(WAIT_S)
        except Exception as error:
            self._runtime.abort(await runner.broke(error))
        finally:
            runner.end()

    def trainer(self, algorithm: Any, adapter: Any) -> Any:
        """Return a Trainer of Agent Lightning, for an algorithm that asks for its own."""
        return LightningTrainer(
            n_runners=1,
            algorithm=algorithm,
            strategy=SharedMemoryExecutionStrategy(n_runners=1, main_thread="algorithm", managed_store=False),
            store=self.store,
            tracer=RecorderTracer(),
            adapter=adapter,
        )

    def resources(self, resources_id: str | None) -> Mapping[str, Any]:
        """Return the resources of that id; without one, the latest."""
        store = self.store
        found = _call(store.get_resources_by_id(resources_id) if resources_id else store.get_latest_resources())
        return found.resources if found is not None else {}

    def unfinished(self, resources_id: str | None) -> int:
        """Return how many rollouts with these resources have not finished."""
        return sum(own == resources_id for own in list(self.store.open.values()))


def _call(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a store operation, in this thread or, where an event loop runs in it, in one of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as own:
        return own.submit(asyncio.run, coroutine).result()
