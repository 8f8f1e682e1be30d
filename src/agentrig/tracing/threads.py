"""Makes threads record into the rollout that starts them: their context is a copy, where Python gives an empty one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.thread import _worker as pool_worker
from contextvars import copy_context
from functools import partial
from typing import Any

from agentrig.tracing.recorder import active


def install() -> None:
    """Make threads, also those of a pool, record into the rollout that starts them."""
    submit, start = ThreadPoolExecutor.submit, threading.Thread.start

    def submitted(pool: Any, work: Callable[..., Any], /, *args: Any, **more: Any) -> Any:
        if active.get() is None:
            return submit(pool, work, *args, **more)
        return submit(pool, copy_context().run, work, *args, **more)

    def started(thread: Any) -> None:
        # A pool's threads live longer than the rollout that started them; each submitted call has its own context.
        if active.get() is not None and getattr(thread, "_target", None) is not pool_worker:
            thread.run = partial(copy_context().run, thread.run)
        start(thread)

    ThreadPoolExecutor.submit = submitted  # type: ignore[method-assign]
    threading.Thread.start = started  # type: ignore[method-assign, assignment]
