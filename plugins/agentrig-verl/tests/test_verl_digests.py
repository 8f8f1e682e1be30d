"""The digests of a step's trajectories, which `agentrig replay` compares."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

pytest.importorskip("torch")

from agentrig_verl.trajectories import digests_of, trajectories_of

from agentrig import Outcome, Score, Task, Trace, Triplet
from agentrig.rollouts import Rollout


def group(*values: float, logprob: float = -0.5, token: int = 7) -> list[Rollout]:
    return [
        Rollout(
            id=f"r{i}",
            task=Task(id="t", input={}),
            group="g",
            mode="train",
            step=1,
            outcome=Outcome(answer="x"),
            score=Score.ok(value),
            trace=Trace(rollout_id=f"r{i}"),
            triplets=[Triplet(prompt_ids=[1, 2], response_ids=[token, i], logprobs=[logprob, -1.0], reward=value)],
        )
        for i, value in enumerate(values)
    ]


def digests(rollouts: list[Rollout], uid: str = "u", **more: Any) -> dict[str, str]:
    return digests_of(trajectories_of(rollouts, uid=uid, step=1, **more))


def test_each_digest_changes_with_its_own_stage_only() -> None:
    first = digests(group(0.0, 1.0))
    assert digests(group(0.0, 1.0), uid="another of verl's random ids") == first
    scaled = digests(group(0.0, 1.0), negative_scale=0.5)
    assert scaled["advantages"] != first["advantages"]
    assert scaled["samples"] == first["samples"]
    for other in (group(0.0, 1.0, token=8), group(0.0, 1.0, logprob=-0.6)):
        assert digests(other)["samples"] != first["samples"]
        assert digests(other)["advantages"] == first["advantages"]
    lost = [attrs.evolve(r, triplets=r.triplets if i else ()) for i, r in enumerate(group(0.0, 1.0))]
    assert digests(lost)["samples"] != first["samples"]
