"""The reward `weighted`: a weighted sum of other rewards, of which one decides what counts as correct."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from agentrig.correctness import Correctness
from agentrig.grading.config import WeightedConfig, weights
from agentrig.rewards import Part, Score
from agentrig.runners.scorer import Scorer


class Weighted:
    """Scores with every part, all at the same time, and adds up weight times value.

    One part's `invalid` score makes the whole score invalid: a sum without it would be another reward. A part's timeout
    makes it a timeout, with the sum of the values that there are.
    """

    def __init__(self, config: WeightedConfig, parts: Mapping[str, Part]) -> None:
        self._parts = parts
        self._weights = weights(config)
        self._primary = config.primary or next(iter(parts))
        self.takes_own_reward = any(getattr(part.reward, "takes_own_reward", False) for part in parts.values())

    def score_many(self, items: Sequence[tuple[Any, ...]], budget_s: float) -> list[Score]:
        """Score a batch; see `agentrig.rewards.Reward`."""

        def scored(part: Part) -> list[Score]:
            rule = Correctness(reward_at=part.correct_at)
            return Scorer(part.reward, budget_s=budget_s, correctness=rule, sees_trace=part.sees_trace)(items)

        with ThreadPoolExecutor(len(self._parts), thread_name_prefix="reward-part") as pool:
            found = dict(zip(self._parts, pool.map(scored, self._parts.values()), strict=True))
        return [self._sum({name: scores[i] for name, scores in found.items()}) for i in range(len(items))]

    def _sum(self, scores: Mapping[str, Score]) -> Score:
        for name, score in scores.items():
            if score.value is None:
                reason = score.details.get("reason", "no reason given")
                return Score.invalid(f"the part {name}: {reason}", part=name)
        values = {name: score.value for name, score in scores.items() if score.value is not None}
        components: dict[str, float] = dict(values)
        for name, score in scores.items():
            components |= {f"{name}.{key}": value for key, value in score.components.items()}
        late = [name for name, score in scores.items() if score.status == "timeout"]
        details: dict[str, Any] = {name: dict(score.details) for name, score in scores.items() if score.details}
        if said := [f"{name}: {score.feedback}" for name, score in scores.items() if score.feedback]:
            details["feedback"] = "\n".join(said)
        if turn := scores[self._primary].details.get("turn"):
            details["turn"] = turn
        if late:
            details["reason"] = f"the part {late[0]}: {scores[late[0]].details.get('reason', 'timeout')}"
        return Score(
            status="timeout" if late else "ok",
            value=math.fsum(self._weights[name] * value for name, value in values.items()),
            components=components,
            details=details,
            correct=None if late else scores[self._primary].correct,
            calls=scores[self._primary].calls,
        )
