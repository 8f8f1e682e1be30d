"""The store of Agent Lightning forgets a rollout wholly: no attribute, private or not, still names it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from agentrig.runners.runtime import EnqueueRolloutRequest, Store


def places(thing: Any, name: str, path: str = "store", seen: set[int] | None = None) -> Iterator[str]:
    """Yield the attributes, keys and elements below an object that hold a string."""
    seen = set() if seen is None else seen
    if isinstance(thing, str):
        if name in thing:
            yield path
        return
    if id(thing) in seen or isinstance(thing, (bytes, int, float, type)):
        return
    seen.add(id(thing))
    if isinstance(thing, Mapping):
        for key, value in list(thing.items()):
            yield from places(key, name, path, seen)
            yield from places(value, name, path, seen)
    elif isinstance(thing, Iterable) and hasattr(thing, "__len__"):
        for value in list(thing):
            yield from places(value, name, path, seen)
    if type(thing).__module__.split(".")[0] in ("agentlightning", "agentrig"):
        for key, value in getattr(thing, "__dict__", {}).items():
            yield from places(value, name, f"{path}.{key}", seen)


async def passed(store: Store) -> str:
    """Bring one rollout through the store as a run does."""
    (rollout,) = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input={"n": 1})])
    (attempted,) = await store.dequeue_many_rollouts(limit=1, worker_id="agentrig")
    assert attempted.rollout_id in store._running_rollout_ids
    await store.update_attempt(rollout.rollout_id, attempted.attempt.attempt_id, status="succeeded")
    return rollout.rollout_id


def test_nothing_in_the_store_names_a_forgotten_rollout() -> None:
    async def run() -> tuple[set[str], set[str]]:
        store = Store()
        name = await passed(store)
        before = set(places(store, name))
        await store.forget([name])
        return before, set(places(store, name))

    before, after = asyncio.run(run())
    assert {"store._completion_events", "store._start_time_by_rollout"} <= before
    assert any("_items" in place for place in before)
    assert after == set()
