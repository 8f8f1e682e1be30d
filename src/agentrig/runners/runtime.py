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
from typing import Any, TypeVar

from agentrig.adapters import Adapter
from agentrig.endpoints import Endpoint
from agentrig.errors import AgentrigError
from agentrig.lightning_import import import_lightning
from agentrig.processes.ends import Interrupted
from agentrig.runners.jobs import Job, Result
from agentrig.runners.processes import Pool
from agentrig.tracing.recorder import current, plain

import_lightning()  # before the imports below, which would bring litellm and its network calls

from agentlightning import (  # noqa: E402, TID253  (this module is itself imported lazily)
    Algorithm,
    EnqueueRolloutRequest,
    InMemoryLightningStore,
    LitAgent,
    Runner,
    SharedMemoryExecutionStrategy,
    Trainer,
    Triplet,
)
from agentlightning import Span as LightningSpan  # noqa: E402, TID253
from agentlightning.adapter import TraceAdapter  # noqa: E402, TID253
from agentlightning.emitter import emit_reward  # noqa: E402, TID253
from agentlightning.tracer import Tracer  # noqa: E402, TID253
from agentlightning.types import SpanCoreFields, TraceStatus  # noqa: E402, TID253

from agentrig.runners.lightning_spans import (  # noqa: E402
    endpoint_of,
    final_reward,
    from_lightning,
    lightning_llm,
    to_lightning,
)

logging.getLogger("agentlightning").setLevel(logging.WARNING)
log = logging.getLogger(__name__)
T = TypeVar("T")

IDLE_POLL_S = 0.02
"""How long the runner sleeps when there is nothing to do; Agent Lightning's own polls every 5 s."""

UNWIND_S = 5.0
"""Seconds that an interrupted body may take to shut down its server and other resources."""

MODES = {"train": "train", "validation": "val", "report": "test", "dev": "val"}


class Store(InMemoryLightningStore):
    """Agent Lightning's in-memory store, with a method that deletes finished rollouts to bound memory."""

    def __init__(self) -> None:
        # The default estimator counts every token id of every span; `forget` bounds the store's memory anyway.
        super().__init__(thread_safe=True, span_size_estimator=lambda span: 0)

    async def forget(self, rollout_ids: Sequence[str]) -> None:
        """Delete everything about finished rollouts."""
        async with self.collections.atomic(
            mode="rw", snapshot=False, labels=["rollouts", "attempts", "spans"]
        ) as collections:
            for rollout_id in rollout_ids:
                await collections.evict_spans_for_rollout(rollout_id)
                attempts = await collections.attempts.query(filter={"rollout_id": {"exact": rollout_id}})
                await collections.attempts.delete(list(attempts.items))
                rollout = await collections.rollouts.get({"rollout_id": {"exact": rollout_id}})
                if rollout is not None:
                    await collections.rollouts.delete([rollout])
                drop_private(self, rollout_id)


def drop_private(store: InMemoryLightningStore, rollout_id: str) -> None:
    """Delete a rollout from the store's private attributes; the public methods leave it there.

    Only this function uses private attributes of the store. `tests/runners/test_store.py` fails when they change.
    """
    store.collections.attempts._items.pop(rollout_id, None)  # deleting the attempts leaves their empty dict
    store._completion_events.pop(rollout_id, None)
    store._start_time_by_rollout.pop(rollout_id, None)
    store._span_bytes_by_rollout.pop(rollout_id, None)
    store._running_rollout_ids.discard(rollout_id)


class PoolRunner(Runner[Any]):
    """A runner of Agent Lightning's that keeps a pool of processes busy.

    Args:
        pool: Runs the agent.
        finished: Called in the runner's thread with every result and its task's input; a number that it returns
            is stored as the rollout's reward, as Agent Lightning's own algorithms expect it.
        filed: Called when the store has a result; the caller may then delete the rollout.
        broken: Called with the reason when the pool cannot continue.
    """

    def __init__(
        self,
        pool: Pool,
        finished: Callable[[Result, Mapping[str, Any]], float | None],
        filed: Callable[[Result], None],
        broken: Callable[[Exception], None],
    ) -> None:
        self._pool, self._finished, self._filed, self._broken = pool, finished, filed, broken
        self._store: Any = None
        self._attempts: dict[str, tuple[str, Mapping[str, Any]]] = {}

    def init(self, agent: Any, **more: Any) -> None:
        """Nothing to do: the runner processes build the agent."""

    def init_worker(self, worker_id: int, store: Any, **more: Any) -> None:
        """Keep a reference to the store."""
        self._store = store

    def teardown_worker(self, worker_id: int, *args: Any, **more: Any) -> None:
        """Drop the reference to the store."""
        self._store = None

    def teardown(self, *args: Any, **more: Any) -> None:
        """Nothing to do: the pool's owner closes it."""

    async def iter(self, *, event: Any = None) -> None:
        """Move rollouts from the store to the pool, and results back, until `event` is set."""
        try:
            while event is None or not event.is_set():
                await self._turn()
        except Exception as error:
            self._broken(error)

    async def _turn(self) -> None:
        room = self._pool.room
        if room > 0:
            for attempted in await self._store.dequeue_many_rollouts(limit=room, worker_id="agentrig"):
                await self._start(attempted)
        busy = self._pool.pending > 0
        results = self._pool.poll(0.2 if busy else IDLE_POLL_S)
        for result in results:
            await self._finish(result)
        await asyncio.sleep(0)

    async def _start(self, attempted: Any) -> None:
        resources = await self._store.get_resources_by_id(attempted.resources_id) if attempted.resources_id else None
        resources = resources or await self._store.get_latest_resources()
        endpoint = endpoint_of(resources.resources if resources else {})
        self._attempts[attempted.rollout_id] = attempted.attempt.attempt_id, attempted.input
        self._pool.submit(Job(id=attempted.rollout_id, input=attempted.input, endpoint=endpoint))

    async def _finish(self, result: Result) -> None:
        attempt_id, task_input = self._attempts.pop(result.id)
        spans = to_lightning(result.trace, result.id, attempt_id)
        reward = self._finished(result, task_input)
        if reward is not None:
            core = emit_reward(float(reward), propagate=False)
            spans.append(
                LightningSpan.from_core_fields(
                    core, rollout_id=result.id, attempt_id=attempt_id, sequence_id=len(spans) + 1
                )
            )
        if spans:
            await self._store.add_many_spans(spans)
        status = "succeeded" if result.outcome.failure is None else "failed"
        await self._store.update_attempt(result.id, attempt_id, status=status)
        self._filed(result)


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
            with contextlib.suppress(RuntimeError):  # the loop of an abandoned body is closed
                self._wake()


class RecorderTracer(Tracer):
    """Agent Lightning's tracer interface, on top of the recorder of the current rollout.

    `emit_reward` and similar functions find it as the active tracer. LangChain needs no handler from it, because
    the recorder attaches its own; callers that require one get a handler that does nothing.
    """

    def create_span(
        self, name: str, attributes: Any = None, timestamp: float | None = None, status: Any = None
    ) -> SpanCoreFields:
        """Record a finished span."""
        now = timestamp or time.time()
        recorder = current()
        if recorder is not None:
            recorder.add(name, now, {str(k): plain(v) for k, v in dict(attributes or {}).items()})
        return SpanCoreFields(
            name=name,
            attributes=dict(attributes or {}),
            start_time=now,
            end_time=now,
            status=status or TraceStatus(status_code="OK"),
        )

    def get_langchain_handler(self) -> Any:
        """Return a handler that does nothing."""
        from langchain_core.callbacks.base import BaseCallbackHandler

        return BaseCallbackHandler()

    def get_last_trace(self) -> list[LightningSpan]:
        """Return the spans of the current rollout so far."""
        recorder = current()
        return to_lightning(recorder.trace(), recorder.rollout_id, "0") if recorder is not None else []


class SpanAdapter(TraceAdapter[Any]):
    """Agent Lightning's adapter interface, on top of an agentrig adapter."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter

    def adapt(self, source: Any, /) -> list[Triplet]:
        """Return the triplets of spans, with the reward that is stored among them."""
        spans = list(source)
        reward = final_reward(spans)
        trace = from_lightning(spans[0].rollout_id if spans else "", spans)
        return [
            Triplet(
                prompt={"token_ids": list(t.prompt_ids)},
                response={"token_ids": list(t.response_ids)},
                reward=reward,
                metadata={"agent_name": t.node, "response_id": t.span_id},
            )
            for t in self._adapter(trace)
        ]


class Runtime:
    """Agent Lightning's Trainer and store around a pool.

    Args:
        pool: Runs the agent; started and closed here.

    Attributes:
        store: Agent Lightning's store.
        results: Finished results, in the order in which they finished; an exception if the pool broke.
        reward_of: Gets every result and its task's input in the runner's thread and returns the reward to store.
            With None, the initial value, results go into `results` instead.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.store = Store()
        self.results: queue.SimpleQueue[Result | Exception] = queue.SimpleQueue()
        self.reward_of: Callable[[Result, Mapping[str, Any]], float | None] | None = None
        self.trainer: Any = None
        self._resources: dict[str, str] = {}
        self._aborted: Interrupted | None = None
        self._body: Any = None
        self._fitting = False

    def run(self, body: Callable[[], None]) -> None:
        """Start the runners, call `body` in a thread, then shut everything down; raises what `body` raised."""
        algorithm = self._body = _Body(body)
        runner = PoolRunner(self.pool, self._judge, self._hand_over, self.results.put)
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
            self.pool.start()
            self._fitting = True
            if self._aborted is None:
                self.trainer.fit(LitAgent())
        finally:
            self._fitting = False
            self.pool.close()
        if self._aborted is not None:
            if algorithm.thread.is_alive():
                algorithm.thread.join(UNWIND_S)
            self._aborted.abandoned = algorithm.thread.is_alive()
            raise self._aborted
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
        while not self.pool.built.wait(0.05):
            if not self.results.empty():
                broken = self.results.get()
                if isinstance(broken, Exception):
                    raise broken

    def enqueue(self, inputs: Sequence[tuple[Mapping[str, Any], Endpoint]], *, mode: str) -> list[str]:
        """Put rollouts into the store, each with its endpoint; return their ids, in order."""

        async def put() -> list[str]:
            requests = [
                EnqueueRolloutRequest(input=dict(i), mode=MODES[mode], resources_id=await self._resource(endpoint))
                for i, endpoint in inputs
            ]
            return [r.rollout_id for r in await self.store.enqueue_many_rollouts(requests)]

        ids = self.call(put())
        self.pool.wake()
        return ids

    async def _resource(self, endpoint: Endpoint) -> str:
        key = repr((endpoint, endpoint.api_key))
        if key not in self._resources:
            self._resources[key] = (await self.store.add_resources({"llm": lightning_llm(endpoint)})).resources_id
        return self._resources[key]

    def forget(self, rollout_ids: Sequence[str]) -> None:
        """Delete finished rollouts from the store."""
        self.call(self.store.forget(rollout_ids))

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a store operation in this thread."""
        return asyncio.run(coroutine)

    def _judge(self, result: Result, task_input: Mapping[str, Any]) -> float | None:
        return self.reward_of(result, task_input) if self.reward_of is not None else None

    def _hand_over(self, result: Result) -> None:
        if self.reward_of is None:
            self.results.put(result)
