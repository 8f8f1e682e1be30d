"""Rollouts of the next step, which run while the current one is learned."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from agentrig.background import in_background
from agentrig.rollouts import Rollout

log = logging.getLogger(__name__)

END_S = 10.0
"""Seconds that rollouts which nobody waits for any more may take to end: the reward may be at work."""

Told = Callable[["RolloutsAhead", Sequence[Rollout]], None]


class RolloutsAhead:
    """Training rollouts that run while the step before is learned; made by `RunSession.begin_rollouts`.

    Args:
        run: Runs, scores and adapts them; called in the thread `rollouts`.
        step: The step that learns from them.
        waited: Called once they have ended, in the thread that waited.
        file: Stores and checks them.

    Attributes:
        wall_s: Seconds that they took.
        waited_s: Of these, seconds that the algorithm waited for them.
    """

    def __init__(self, run: Callable[[], list[Rollout]], *, step: int, waited: Told, file: Told) -> None:
        self.step = step
        self.wall_s = self.waited_s = 0.0
        self._waited, self._file = waited, file
        self._found: list[Rollout] | None = None

        def timed() -> list[Rollout]:
            start = time.perf_counter()
            found = run()
            self.wall_s = time.perf_counter() - start
            return found

        self._running = in_background(timed, "rollouts")

    def wait(self) -> None:
        """Wait until all have ended: the server then gets no request, and may take new weights.

        The seconds count as `rollout` and `reward` of the current step.
        """
        self._ended()

    def rollouts(self) -> list[Rollout]:
        """Return them, stored and checked; call it once, after the `end_step` before theirs."""
        found = self._ended()
        self._file(self, found)
        return found

    def end(self) -> None:
        """Wait a little for the thread that runs them, whose queue has been told; ignore what it raises."""
        try:
            self._running.exception(END_S)
        except TimeoutError:
            log.warning("the rollouts of step %d did not end within %g s; the run ends without them", self.step, END_S)

    def _ended(self) -> list[Rollout]:
        if self._found is None:
            start = time.perf_counter()
            self._found = self._running.result()
            self.waited_s = min(time.perf_counter() - start, self.wall_s)
            self._waited(self, self._found)
        return self._found
