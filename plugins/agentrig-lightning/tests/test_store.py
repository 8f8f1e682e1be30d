"""The store deletes rollouts completely, so that memory does not grow in long runs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import Any

from agentrig_lightning.store import Store


def kept(value: Any, sought: str, seen: set[int], path: str) -> Iterator[str]:
    """Yield the paths below an object, through attributes and containers, to values that contain a text."""
    if isinstance(value, str):  # one text may be in many places
        if sought in value:
            yield path
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        for key, item in list(value.items()):
            yield from kept(key, sought, seen, f"{path} key")
            yield from kept(item, sought, seen, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple | set | frozenset | deque):
        for item in list(value):
            yield from kept(item, sought, seen, f"{path}[]")
    elif hasattr(value, "__dict__") and type(value).__module__.startswith(("agentlightning", "agentrig")):
        yield from kept(vars(value), sought, seen, path)


def test_nothing_is_left_of_a_deleted_rollout() -> None:
    async def use() -> tuple[list[str], list[str], int]:
        store = Store()
        first, _ = [await store.enqueue_rollout(input={"n": n}) for n in range(2)]
        for _ in range(2):
            attempted = await store.dequeue_rollout(worker_id="w")
            assert attempted is not None
            attempt = attempted.attempt.attempt_id
            await store.update_attempt(attempted.rollout_id, attempt, status="succeeded")
        before = list(kept(store, first.rollout_id, set(), "store"))
        await store.forget([first.rollout_id])
        after = list(kept(store, first.rollout_id, set(), "store"))
        return before, after, len(await store.query_rollouts())

    before, after, left = asyncio.run(use())
    assert len(before) > 3, "the search finds nothing in the store: its attributes have changed"
    assert not after
    assert left == 1
