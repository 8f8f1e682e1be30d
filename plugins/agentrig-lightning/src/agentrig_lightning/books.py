"""The books of an algorithm that runs the agent through Agent Lightning's store: steps, modes, guards, files.

Such an algorithm does not say where a step begins. A step is what ran with one version of the resources: the first
resources that a rollout has are step 1, the next ones step 2. A step closes once a rollout of a later step is filed and
none of its own is open; what runs with its resources after that belongs to the latest step.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from agentrig.rollouts import Mode, Rollout
from agentrig.run.guards import check_failures

log = logging.getLogger(__name__)

EARLY = 8
"""If the first rollouts of a step, this many, all fail, the run stops without waiting for the others."""

MODES: Mapping[str, Mode] = {"train": "train", "val": "validation", "test": "report"}
"""Agent Lightning's modes; a rollout without a mode is trained on."""


@attrs.define
class _Step:
    number: int
    closed: bool = False
    rollouts: dict[Mode, list[Rollout]] = attrs.field(factory=lambda: defaultdict(list))


class ForeignBooks:
    """Files each rollout under its mode and step, and applies the guards that hold without the algorithm's help.

    The failure limit always holds. The checks of triplets, sampling and equal rewards hold once the algorithm asks for
    triplets: one that searches for prompts needs none. Nobody can check the weights: the algorithm does not say what
    they are.

    Args:
        session: The run's `agentrig.run.session.RunSession`.
        failure_limit: Largest share of a step's rollouts that may fail.
        learns: Whether the algorithm has asked for triplets so far.
        sampling: Returns the sampling fields of resources, which the agent must pass with every call.
        unfinished: Returns how many rollouts with these resources have not finished.
    """

    def __init__(
        self,
        session: Any,
        *,
        failure_limit: float,
        learns: Callable[[], bool],
        sampling: Callable[[str | None], Mapping[str, Any]],
        unfinished: Callable[[str | None], int],
    ) -> None:
        self._session, self._failure_limit, self._learns = session, failure_limit, learns
        self._sampling, self._unfinished = sampling, unfinished
        self._steps: dict[str | None, _Step] = {}
        self._lock = threading.Lock()

    def place(self, mode: str | None, resources_id: str | None) -> tuple[Mode, int]:
        """Return the mode and the step of a rollout that Agent Lightning's store has."""
        with self._lock:
            return MODES.get(mode or "train", "train"), self._step(resources_id).number

    def _step(self, resources_id: str | None) -> _Step:
        step = self._steps.get(resources_id)
        if step is None:
            step = self._steps[resources_id] = _Step(number=len(self._steps) + 1)
        return list(self._steps.values())[-1] if step.closed else step

    def file(self, rollout: Rollout) -> None:
        """Take a finished rollout; close the steps before its own that have ended.

        Raises:
            RunStopped: A guard stops the run; what was taken is in the run directory.
        """
        with self._lock:
            step = next(s for s in self._steps.values() if s.number == rollout.step)
            own = step.rollouts[rollout.mode]
            own.append(rollout)
            if len(own) == EARLY and all(r.failure for r in own):
                self._save()
                check_failures(own, self._failure_limit, step=rollout.step, mode=rollout.mode)
            for resources_id, earlier in self._steps.items():
                if earlier.number < rollout.step and not earlier.closed and not self._unfinished(resources_id):
                    self._close(resources_id, earlier)

    def end(self) -> None:
        """Close the steps that are open; an algorithm without any rollout gets an empty one.

        Raises:
            RunStopped: A guard stops the run.
        """
        with self._lock:
            if not self._steps:
                log.warning("the algorithm ended without a rollout")
                self._steps[None] = _Step(number=1)
            for resources_id, step in self._steps.items():
                if not step.closed:
                    self._close(resources_id, step)

    def save(self) -> None:
        """Write the rollouts of the open steps without any check: for a run that ends with an error."""
        with self._lock:
            self._save()

    def _save(self) -> None:
        for step in self._steps.values():
            if not step.closed:
                for mode, rollouts in step.rollouts.items():
                    self._session.store_rollouts(rollouts, mode=mode, step=step.number)

    def _close(self, resources_id: str | None, step: _Step) -> None:
        """Store a step's rollouts, check them, and write its line."""
        step.closed = True
        for mode, rollouts in step.rollouts.items():
            self._session.file(
                rollouts,
                mode=mode,
                step=step.number,
                sampling=self._sampling(resources_id),
                wall_s=self._session.step_seconds(),
                expected=len(rollouts),
                learns=self._learns(),
            )
        self._session.end_foreign_step(step.number, validated=step.rollouts.get("validation", ()))
