"""Counts over a step's rollouts: failures and nodes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from agentrig.rollouts import Rollout

log = logging.getLogger(__name__)


def count_failures(rollouts: Sequence[Rollout]) -> dict[str, int]:
    """Return how many rollouts failed, by kind."""
    return dict(Counter(r.failure for r in rollouts if r.failure is not None))


def count_nodes(rollouts: Sequence[Rollout]) -> dict[str, dict[str, int]]:
    """Return, by graph node, how many LLM calls were seen and how many became triplets."""
    seen: Counter[str] = Counter()
    trained: Counter[str] = Counter()
    for rollout in rollouts:
        for call in rollout.trace.llm_calls():
            nodes = rollout.trace.nodes(call)
            seen[nodes[0] if nodes else "(no node)"] += 1
        for triplet in rollout.triplets:
            trained[triplet.node or "(no node)"] += 1
    return {"seen": dict(seen), "trained": dict(trained)}


def reason_of(rollout: Rollout) -> str:
    """Return why a rollout failed, as text."""
    if rollout.outcome.failure is not None:
        return rollout.outcome.message or rollout.outcome.failure
    details = rollout.score.details if rollout.score is not None else {}
    return str(details.get("reason", "the reward could not score it"))
