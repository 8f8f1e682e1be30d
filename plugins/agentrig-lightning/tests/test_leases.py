"""Leases of runners outside the process: which have run out, and why."""

from __future__ import annotations

from agentrig_lightning.leases import Leases


def test_a_sign_of_life_of_the_runner_or_of_the_rollout_keeps_a_lease() -> None:
    leases = Leases()
    leases.take("a", "a-1", "one")
    leases.take("b", "b-1", "two")
    assert leases.overdue(silent_s=5, deadline_s=5) == []
    gone = {lease.rollout_id: why for lease, why in leases.overdue(silent_s=-1, deadline_s=5)}
    assert gone.keys() == {"a", "b"}
    assert "one has given no sign of life" in gone["a"]
    leases._held["a"].seen = leases._held["b"].seen = 0.0
    leases._workers.clear()
    leases.touch("a")
    assert [x.rollout_id for x, _ in leases.overdue(silent_s=5, deadline_s=5)] == ["b"]
    leases.alive("two")
    assert leases.overdue(silent_s=5, deadline_s=5) == []
    assert leases.workers(5) == ["two"]
    held = leases.overdue(silent_s=5, deadline_s=-1)
    assert "has held the rollout" in held[0][1]
    assert [x.attempt_id for x in leases.held_by("two")] == ["b-1"]
    leases.drop("b")
    assert leases.held_by("two") == []
