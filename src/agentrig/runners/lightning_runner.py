"""A `Runner` of Agent Lightning's that sends the store's rollouts to a pool of processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from agentrig.errors import AgentrigError, place_of
from agentrig.lightning_import import import_lightning
from agentrig.runners.jobs import Result
from agentrig.runners.processes import Pool
from agentrig.text import words_of

import_lightning()  # before the imports below, which would bring litellm and its network calls

from agentlightning import Runner  # noqa: E402, TID253  (this module is itself imported lazily)
from agentlightning.types import AttemptedRollout  # noqa: E402, TID253

from agentrig.runners.lightning_resources import job_of  # noqa: E402
from agentrig.runners.lightning_results import score_span  # noqa: E402
from agentrig.runners.lightning_spans import final_reward, to_lightning  # noqa: E402

IDLE_POLL_S = 0.02
"""How long the runner sleeps when there is nothing to do; Agent Lightning's own polls every 5 s."""


class PoolRunner(Runner[Any]):
    """A runner of Agent Lightning's that keeps a pool of processes busy.

    Args:
        pool: Runs the agent.
        finished: Called in the runner's thread with every result and its rollout; a number that it returns is stored
            as the rollout's reward, as Agent Lightning's own algorithms expect it. Not called for an attempt after
            which the rollout's own configuration lets it run again.
        filed: Called when the store has a result; the caller may then delete the rollout.
        broken: Awaited with the reason when the runner cannot continue.
    """

    def __init__(
        self,
        pool: Pool,
        finished: Callable[[Result, AttemptedRollout], float | None],
        filed: Callable[[Result], None],
        broken: Callable[[AgentrigError], Awaitable[None]],
    ) -> None:
        self._pool, self._finished, self._filed, self._broken = pool, finished, filed, broken
        self._store: Any = None
        self._attempts: dict[str, AttemptedRollout] = {}

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
        except AgentrigError as error:
            await self._broken(error)
        except Exception as error:
            named = AgentrigError(f"the run's runner, or its store, failed: {words_of(error)}{place_of(error)}")
            named.__cause__ = error
            await self._broken(named)

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
        self._attempts[attempted.rollout_id] = attempted
        self._pool.submit(job_of(attempted, resources))

    async def _finish(self, result: Result) -> None:
        attempted = self._attempts.pop(result.id)
        attempt_id = attempted.attempt.attempt_id
        status: Any = "succeeded" if result.outcome.failure is None else "failed"
        spans = to_lightning(result.trace, result.id, attempt_id)
        again = await self._store.runs_again(attempted, status)
        reward = None if again else self._finished(result, attempted)
        if reward is not None and reward != final_reward(spans):  # the agent's own reward is among its spans
            number = max((span.sequence_id for span in spans), default=0) + 1
            spans.append(score_span(float(reward), rollout_id=result.id, attempt_id=attempt_id, sequence_id=number))
        if spans:
            await self._store.add_many_spans(spans)
        await self._store.update_attempt(result.id, attempt_id, status=status)
        if not again:
            self._filed(result)
