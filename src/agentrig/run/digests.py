"""Digests of a step's rollouts: what `agentrig replay` compares those of a repeated step with."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from agentrig.adapters import Triplet
from agentrig.rollouts import Rollout


def rollout_digests(rollouts: Sequence[Rollout]) -> dict[str, str]:
    """Return the digests (BLAKE2b, 16 hexadecimal characters) of a step's rollouts, in their order.

    Returns:
        `rewards`: ids, groups, failures and rewards. `triplets`: nodes, tokens and log-probabilities of all triplets.
    """
    rewards, triplets = hashlib.blake2b(digest_size=8), hashlib.blake2b(digest_size=8)
    for r in rollouts:
        rewards.update(repr((r.id, r.group, r.failure, r.value)).encode())
        triplets.update(r.id.encode())
        for t in r.triplets:
            triplets.update(_bytes_of(t))
    return {"rewards": rewards.hexdigest(), "triplets": triplets.hexdigest()}


def _bytes_of(t: Triplet) -> bytes:
    head = repr((t.node, len(t.prompt_ids), len(t.response_ids), t.logprobs is None)).encode()
    tokens = array("q", t.prompt_ids).tobytes() + array("q", t.response_ids).tobytes()
    return head + tokens + array("d", t.logprobs or ()).tobytes()
