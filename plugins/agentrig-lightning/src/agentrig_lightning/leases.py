"""Leases: which attempts runners outside this process hold, and which of those runners are still there."""

from __future__ import annotations

import time

import attrs


@attrs.define
class Lease:
    """An attempt that another runner has taken; times are on the monotonic clock.

    Attributes:
        worker: The runner's id.
        seen: The last sign of life that names this attempt.
    """

    rollout_id: str
    attempt_id: str
    worker: str
    taken: float = attrs.field(factory=time.monotonic)
    seen: float = attrs.field(factory=time.monotonic)


class Leases:
    """The attempts of runners outside this process, by rollout. Safe in several threads.

    Each method makes one step on a dict, or takes a copy of it first.
    """

    def __init__(self) -> None:
        self._held: dict[str, Lease] = {}
        self._workers: dict[str, float] = {}

    def take(self, rollout_id: str, attempt_id: str, worker: str) -> None:
        """Note that a runner has taken an attempt."""
        self.alive(worker)
        self._held[rollout_id] = Lease(rollout_id, attempt_id, worker)

    def drop(self, rollout_id: str) -> None:
        """Note that nobody holds a rollout any more."""
        self._held.pop(rollout_id, None)

    def alive(self, worker: str) -> None:
        """Note a sign of life of a runner."""
        self._workers[worker] = time.monotonic()

    def touch(self, rollout_id: str) -> None:
        """Note a sign of life of a rollout: a span, for example."""
        if (lease := self._held.get(rollout_id)) is not None:
            lease.seen = time.monotonic()

    @property
    def held(self) -> int:
        """How many attempts are held."""
        return len(self._held)

    def held_by(self, worker: str) -> list[Lease]:
        """Return what a runner holds."""
        return [lease for lease in list(self._held.values()) if lease.worker == worker]

    def workers(self, within_s: float) -> list[str]:
        """Return the runners that gave a sign of life in the last seconds."""
        now = time.monotonic()
        return [worker for worker, seen in list(self._workers.items()) if now - seen <= within_s]

    def overdue(self, *, silent_s: float, deadline_s: float) -> list[tuple[Lease, str]]:
        """Return the leases that have run out, and why, as text.

        Args:
            silent_s: Longest time without a sign of life of the runner or the rollout, in seconds.
            deadline_s: Longest time that a runner may hold a rollout, in seconds.
        """
        now = time.monotonic()
        found = []
        for lease in list(self._held.values()):
            silent = now - max(lease.seen, self._workers.get(lease.worker, 0.0))
            if silent > silent_s:
                found.append((lease, f"the runner {lease.worker} has given no sign of life for {silent:.0f} s"))
            elif now - lease.taken > deadline_s:
                found.append((lease, f"the runner {lease.worker} has held the rollout for {deadline_s:g} s"))
        return found
