"""Recording: installs the taps, and records what happens in a context.

A recorder gets spans from two taps: LangChain and LangGraph report their runs to a callback handler, and the httpx tap
sees calls to the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from agentrig.tracing import connections, httpx_tap, langchain_tap, threads
from agentrig.tracing.recorder import Recorder, active, parent_span

_installed = False


def install() -> None:
    """Install the taps, once per process; outside `recording` they do nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    httpx_tap.install()
    threads.install()
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
        parent_span.reset(parent)
        active.reset(now)
