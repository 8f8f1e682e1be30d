"""Rollouts of the next step, which run while the current one is learned."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import attrs

from agentrig.rollouts import Rollout

if TYPE_CHECKING:
    from agentrig.run.session import RunSession

log = logging.getLogger(__name__)

END_S = 10.0
"""Seconds that rollouts which nobody waits for any more may take to end: the reward may be at work."""


@attrs.define(kw_only=True, eq=False)
class RolloutsAhead:
    """Training rollouts that run while the step before is learned; made by `RunSession.begin_rollouts`.

    Attributes:
        session: The run's.
        step: The step that learns from them.
        sampling: The sampling fields of their calls.
        expected: How many were asked for.
        running: The thread that runs them: returns them, and the seconds that they took.
        wall_s: These seconds, once the run has waited for them.
        waited_s: Of these, seconds that the run waited for them.
    """

    session: RunSession
    step: int
    sampling: Mapping[str, Any]
    expected: int
    running: Future[tuple[list[Rollout], float]]
    wall_s: float = 0.0
    waited_s: float = 0.0

    def wait(self) -> None:
        """Wait until all have ended: the server then gets no request, and may take new weights.

        The seconds count as `rollout` and `reward` of the current step.
        """
        if self.session.ahead is self:
            start = time.perf_counter()
            found, self.wall_s = self.running.result()
            self.waited_s = min(time.perf_counter() - start, self.wall_s)
            self.session.ahead = None
            self.session.spend(found, wall_s=self.wall_s, waited_s=self.waited_s)

    def rollouts(self) -> list[Rollout]:
        """Return them, stored and checked; call it once, after the `end_step` before theirs."""
        self.wait()
        found, _ = self.running.result()
        self.session.overlap_s = self.wall_s - self.waited_s
        self.session.file(
            found,
            mode="train",
            step=self.step,
            sampling=self.sampling,
            wall_s=self.wall_s,
            expected=self.expected,
            waited_s=0.0,  # the step in which the run waited has these seconds
        )
        return found

    def end(self) -> None:
        """Wait a little for the thread that runs them, whose queue has been told; ignore what it raises."""
        try:
            self.running.exception(END_S)
        except TimeoutError:
            log.warning("the rollouts of step %d did not end within %g s; the run ends without them", self.step, END_S)
