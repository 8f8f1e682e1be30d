"""Agent Lightning's in-memory store, which forgets finished rollouts."""

from __future__ import annotations

from collections.abc import Sequence

from agentrig.lightning_import import import_lightning

import_lightning()  # before the import below, which would bring litellm and its network calls

from agentlightning import InMemoryLightningStore  # noqa: E402, TID253  (this module is itself imported lazily)


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
