"""Recording: installs the taps, and records what happens in a context.

A recorder gets spans from two taps: LangChain and LangGraph report their runs to a callback handler, and the httpx tap
sees calls to the model.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.thread import _worker as pool_worker
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from functools import cache, partial
from typing import Any

from agentrig.tracing import connections, httpx_tap, langchain_tap
from agentrig.tracing.recorder import Recorder, active, parent_span

_installing = threading.Lock()


def install() -> None:
    """Install the taps, once per process; outside `recording` they do nothing."""
    with _installing:  # of threads that come first at the same time, one installs and the others wait
        _install()


@cache
def _install() -> None:
    httpx_tap.install()
    _follow_threads()
    connections.watch(active.get)
    with contextlib.suppress(ImportError):  # an agent that does not use LangChain needs no handler
        langchain_tap.install()


@contextmanager
def recording(rollout_id: str, *, token_ids: bool, muted: bool = False, **options: Any) -> Iterator[Recorder]:
    """Record everything that happens in this context (and in threads that copy it); the arguments of `Recorder`.

    Example:
        ```python
        with recording("r1", token_ids=True) as recorder:
            answer = agent(task_input, endpoint)
        trace = recorder.trace()
        ```
    """
    install()
    recorder = Recorder(rollout_id, token_ids=token_ids, muted=muted, **options)
    now, parent = active.set(recorder), parent_span.set(recorder.root)
    try:
        with nullcontext() if muted else langchain_tap.attached(recorder):
            yield recorder
    finally:
        recorder.ended = True
        parent_span.reset(parent)
        active.reset(now)


def _follow_threads() -> None:
    """Make threads, also those of a pool, record into the rollout that starts them.

    Their context is a copy of the one that starts them, where Python gives an empty one.
    """
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
