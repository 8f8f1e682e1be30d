"""The event loop that the async rollouts of a runner share, and a watch that finds what blocks it."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable
from time import monotonic, sleep  # an agent may replace those of the module
from typing import Any, NoReturn

from agentrig.errors import AgentFailure, own_file, short_path
from agentrig.processes.ends import forks_ended

log = logging.getLogger(__name__)

TICK_S = 1.0
"""Seconds between two looks at whether a loop runs."""

MISSED = 3
"""A loop is blocked if it has not run between so many looks; counted, because a whole process may have been stopped."""

BLOCKED = (
    "which all async rollouts of a runner share: none of them goes on, and their calls time out. Use `await "
    "asyncio.to_thread(...)`, the library's async client, or `def` instead of `async def`"
)
"""What that does, and what to do about it."""


class RunnerLoop:
    """An event loop that runs in a thread of its own. No rollout can end it: others would hang.

    Args:
        told: Is given `FILE:LINE in FUNCTION` of the agent's code that blocks the loop, at each look while it does.
        tick_s: Seconds between two looks.
    """

    def __init__(self, told: Callable[[str], None] = lambda place: None, *, tick_s: float = TICK_S) -> None:
        import asyncio  # it takes long, and only runners have a loop

        self.loop = asyncio.new_event_loop()
        self._told, self._tick_s = told, tick_s
        self._blocked = (0.0, "")  # when it was last seen to be blocked, and where
        self._lock = threading.Lock()
        self._watched = False
        self.loop.stop = self._refuse  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._run, name="loop", daemon=True)
        self._thread.start()

    def result(self, awaitable: Any) -> Any:
        """Wait for an agent's coroutine in this thread; it runs in the loop."""
        import asyncio

        with self._lock:
            watched, self._watched = self._watched, True
        if not watched:
            threading.Thread(target=self._watch, name="loop-watch", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(awaited(awaitable), self.loop).result()

    def blocked_since(self, moment: float) -> str:
        """Return what has blocked the loop since then (on the monotonic clock), as the end of a message, or ''."""
        seen, place = self._blocked
        return blocked_words(place) if place and seen >= moment else ""

    @staticmethod
    def _refuse() -> NoReturn:
        raise RuntimeError("it stopped the event loop that the rollouts of a runner share; return an answer instead")

    def _run(self) -> None:
        while not self.loop.is_closed():
            try:
                self.loop.run_forever()
            except BaseException as error:  # of a task that the agent made: sys.exit, or a KeyboardInterrupt
                log.warning("%r in a task of the agent ended the event loop of its runner: it runs again", error)

    def _watch(self) -> None:
        """Ask the loop at each look to set an event, and see at the next ones whether it has."""
        ran, missed = threading.Event(), 0
        ran.set()
        while not self.loop.is_closed():
            if ran.is_set():
                ran.clear()
                missed = 0
                self.loop.call_soon_threadsafe(ran.set)
            else:
                missed += 1
            if missed >= MISSED and (place := self._place()):
                self._blocked = (monotonic(), place)
                self._told(place)
            sleep(self._tick_s)

    def _place(self) -> str:
        """Return where the agent's code is that the loop runs now; '' if it runs none."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        calls = [call for call, _ in traceback.walk_stack(frame)] if frame is not None else []
        own = [call for call in calls if own_file(call.f_code.co_filename)]
        own = own or [call for call in calls if own_file(call.f_code.co_filename, installed=True)][-1:]
        return f"{short_path(own[0].f_code.co_filename)}:{own[0].f_lineno} in {own[0].f_code.co_name}" if own else ""


def blocked_words(place: str) -> str:
    """Return the end of the message of a rollout that ran too long while its loop was blocked."""
    return f"; meanwhile {place} blocked the event loop, {BLOCKED}"


async def awaited(awaitable: Any) -> Any:
    """Wait for what an agent has returned."""
    try:
        with forks_ended("the agent"):
            return await awaitable
    except SystemExit as error:  # otherwise it would end the event loop of all rollouts
        raise AgentFailure(f"the agent called sys.exit({error.code!r})") from error
