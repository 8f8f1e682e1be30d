"""Samples of a step for tests of the learner."""

from __future__ import annotations

import random

from agentrig_grpo.learner import TrainSample


def samples_of(seed: int = 0) -> list[TrainSample]:
    """Return two groups of four rollouts, with one call of six tokens each."""
    rng = random.Random(seed)
    return [
        TrainSample(
            prompt_ids=[5 + i // 4, 7, 9],
            response_ids=[rng.randrange(5, 300) for _ in range(6)],
            logprobs=[-5.0] * 6,
            advantage=rng.uniform(-1, 1),
            rollout=i,
            group=f"g{i // 4}",
        )
        for i in range(8)
    ]
