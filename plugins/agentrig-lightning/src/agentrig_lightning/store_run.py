"""A run of an algorithm that enqueues rollouts in Agent Lightning's store: which step each of them is of.

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
from agentlightning import Trainer as LightningTrainer  # before a script's replaces it

from agentrig.rollouts import Mode, Rollout
from agentrig_lightning.resources import sampling_of
from agentrig_lightning.store import Store

__all__ = ["LightningTrainer", "StepRecords"]

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


class StepRecords:
    """Files each rollout under its mode and step, and applies the guards that hold without the algorithm's help.

    The failure limit always holds. The checks of triplets, sampling and equal rewards hold once the algorithm asks for
    triplets: one that searches for prompts needs none. Nobody can check the weights: the algorithm does not say what
    they are.

    Args:
        session: The run's `agentrig.run.session.RunSession`.
        store: The store; the agent must pass the sampling fields of its resources with every call.
        learns: Whether the algorithm has asked for triplets so far.
    """

    def __init__(self, session: Any, store: Store, *, learns: Callable[[], bool]) -> None:
        self._session, self._store, self._learns = session, store, learns
        self._steps: dict[str | None, _Step] = {}
        self._lock = threading.Lock()

    def place(self, mode: str | None, resources_id: str | None) -> tuple[Mode, int]:
        """Return the mode and the step of a rollout that Agent Lightning's store has."""
        with self._lock:
            step = self._steps.setdefault(resources_id, _Step(number=len(self._steps) + 1))
            latest = list(self._steps.values())[-1] if step.closed else step
            return MODES.get(mode or "train", "train"), latest.number

    def file(self, rollout: Rollout) -> None:
        """Take a finished rollout; close the steps before its own that have ended."""
        with self._lock:
            step = next(s for s in self._steps.values() if s.number == rollout.step)
            own = step.rollouts[rollout.mode]
            own.append(rollout)
            if len(own) == EARLY and all(r.failure for r in own):
                self._save()
                self._session.check_failures(own, step=rollout.step, mode=rollout.mode)
            for resources_id, earlier in self._steps.items():
                unfinished = resources_id in list(self._store.open.values())
                if earlier.number < rollout.step and not earlier.closed and not unfinished:
                    self._close(resources_id, earlier)

    def end(self) -> None:
        """Close the steps that are open; an algorithm without any rollout gets an empty one."""
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
                sampling=sampling_of(self._store.resources_now(resources_id)),
                wall_s=self._session.step_seconds(),
                expected=len(rollouts),
                learns=self._learns(),
            )
        self._session.end_foreign_step(step.number, validated=step.rollouts.get("validation", ()))
