"""Agent Lightning's in-memory store: it forgets finished rollouts, and it can be ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrig.lightning_import import import_lightning

import_lightning()  # before the imports below, which would bring litellm and its network calls

from agentlightning import InMemoryLightningStore  # noqa: E402, TID253  (this module is itself imported lazily)
from agentlightning.store.utils import rollout_status_from_attempt  # noqa: E402, TID253
from agentlightning.types import AttemptedRollout, AttemptStatus, EnqueueRolloutRequest, Rollout  # noqa: E402, TID253

FINISHED = ("succeeded", "failed", "cancelled")
"""The statuses in which a rollout stays."""


class Store(InMemoryLightningStore):
    """Agent Lightning's in-memory store, with a method that deletes finished rollouts to bound memory.

    Attributes:
        open: The rollouts that have not finished: id to the id of their resources.
        ended: What ended the run; None while it goes on. An algorithm that goes on using the store gets it raised.
    """

    def __init__(self) -> None:
        # The default estimator counts every token id of every span; `forget` bounds the store's memory anyway.
        super().__init__(thread_safe=True, span_size_estimator=lambda span: 0)
        self.open: dict[str, str | None] = {}
        self.ended: Exception | None = None

    async def end(self, reason: Exception) -> None:
        """Cancel every rollout that has not finished, so that nobody waits for one; raise `reason` from now on."""
        self.ended = reason
        for rollout_id in list(self.open):
            await super().update_rollout(rollout_id, status="cancelled")

    def _alive(self) -> None:
        if self.ended is not None:
            raise self.ended

    # --- what an algorithm calls --------------------------------------------------------------------

    async def enqueue_rollout(self, *args: Any, **named: Any) -> Rollout:
        """Add a rollout to the queue; after `end`, raise its reason."""
        self._alive()
        return await super().enqueue_rollout(*args, **named)

    async def enqueue_many_rollouts(self, rollouts: Sequence[EnqueueRolloutRequest]) -> Sequence[Rollout]:
        """Add rollouts to the queue; after `end`, raise its reason."""
        self._alive()
        added: Sequence[Rollout] = await super().enqueue_many_rollouts(rollouts)
        return added

    async def wait_for_rollouts(self, *, rollout_ids: list[str], timeout: float | None = None) -> list[Rollout]:
        """Wait until rollouts have finished; if `end` is called meanwhile, raise its reason."""
        found: list[Rollout] = await super().wait_for_rollouts(rollout_ids=rollout_ids, timeout=timeout)
        self._alive()
        return found

    async def query_rollouts(self, **named: Any) -> Any:
        """Return rollouts; after `end`, raise its reason: an algorithm may wait for rollouts by asking for them."""
        self._alive()
        return await super().query_rollouts(**named)

    async def get_rollout_by_id(self, rollout_id: str) -> Any:
        """Return a rollout; after `end`, raise its reason."""
        self._alive()
        return await super().get_rollout_by_id(rollout_id)

    # --- what the run's runner calls ----------------------------------------------------------------

    async def runs_again(self, attempted: AttemptedRollout, status: AttemptStatus) -> bool:
        """Return whether the rollout goes back to the queue if this attempt ends so: its `config` says."""
        attempt = attempted.attempt.model_copy(update={"status": status})
        return await rollout_status_from_attempt(attempt, attempted.config) not in FINISHED

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

    async def _post_update_rollout(
        self, rollouts: Sequence[tuple[Rollout, Sequence[str]]], skip_enqueue: bool = False
    ) -> None:
        """Note which rollouts are open; the store calls this after every change of a rollout's status."""
        for rollout, _ in rollouts:
            if rollout.status in FINISHED:
                self.open.pop(rollout.rollout_id, None)
            else:
                self.open[rollout.rollout_id] = rollout.resources_id
        await super()._post_update_rollout(rollouts, skip_enqueue=skip_enqueue)


def drop_private(store: InMemoryLightningStore, rollout_id: str) -> None:
    """Delete a rollout from the store's private attributes; the public methods leave it there.

    Only this module uses private attributes of the store. `tests/runners/test_store.py` fails when they change.
    """
    store.collections.attempts._items.pop(rollout_id, None)  # deleting the attempts leaves their empty dict
    store._completion_events.pop(rollout_id, None)
    store._start_time_by_rollout.pop(rollout_id, None)
    store._span_bytes_by_rollout.pop(rollout_id, None)
    store._running_rollout_ids.discard(rollout_id)
