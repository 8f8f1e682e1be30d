"""Compares a server's answer to the probe with the learner's, and describes the differences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs

from agentrig.delivery.asking import Answer

EPSILON = 2.0**-23
"""The distance between two neighboring fp32 numbers, relative to their size."""

CALLS: Mapping[str, float] = {"float32": 0.02, "bfloat16": 0.8, "float16": 0.8}
"""Largest mean difference of a recorded call's log-probabilities in a dtype, in nats, where nothing was measured."""

SHOWN = 4
"""How many tensors a message names."""


@attrs.frozen(kw_only=True)
class Expected:
    """The answer that the learner gives.

    Attributes:
        version: The version of its weights: the step that made them.
        logprobs: The log-probabilities of all tokens of the probe except the first.
        digests: Name to digest of its weights, rounded to the server's dtype; empty if it cannot compute them.
        dtype: The dtype in which the server should compute.
        bound: Largest difference of log-probabilities that dtype and kernels explain.
    """

    version: int
    logprobs: Sequence[float]
    digests: Mapping[str, str]
    dtype: str
    bound: float


def rounding(logprobs: Sequence[float], layers: int) -> float:
    """Return the largest difference that fp32 explains: the same sums in another order.

    Each of about four matrix products of a layer adds a rounding error of half an epsilon, relative to numbers as
    large as the largest log-probability. Independent errors grow with the square root of their number. The factor 16
    covers the maximum over a few hundred tokens and kernels that add in blocks.
    """
    scale = 1.0 + max(map(abs, logprobs), default=0.0)
    return 16 * EPSILON / 2 * math.sqrt(4 * layers + 1) * scale


def difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the largest absolute difference; infinity if one is not finite or the lengths differ."""
    if len(ours) != len(theirs):
        return math.inf
    gaps = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    return max(gaps, default=0.0) if all(map(math.isfinite, gaps)) else math.inf


def wrong_version(expected: Expected, answer: Answer) -> list[str]:
    """Return the message about an answer of another version; none if it is right or the server reports no version."""
    if answer.version is None or answer.version == expected.version:
        return []
    return [f"it answers with the weights of version {answer.version}; the learner's are version {expected.version}"]


def wrong_tensors(expected: Expected, answer: Answer, before: Expected | None) -> list[str]:
    """Return messages about tensors that differ from the learner's."""
    ours, theirs = expected.digests, answer.digests
    if not ours or not theirs:
        return []
    words = []
    if answer.dtype and answer.dtype != expected.dtype:
        words.append(f"it computes in {answer.dtype}; the run's dtype is {expected.dtype}")
    present = set(theirs.values())
    missing = [name for name, value in ours.items() if name not in theirs and value not in present]
    unknown = [name for name in theirs if name not in ours]
    wrong = [name for name, value in theirs.items() if name in ours and ours[name] != value]
    if missing:
        words.append(f"it has no {listed(missing)}")
    if unknown:
        words.append(f"it computes with {listed(unknown)}, which the learner does not have")
    if wrong:
        words.append(f"{len(wrong)} of {len(theirs)} tensors differ from the learner's: {listed(wrong)}")
        words += _whose(wrong, ours, theirs, before)
    return words


def _whose(
    wrong: Sequence[str], ours: Mapping[str, str], theirs: Mapping[str, str], before: Expected | None
) -> list[str]:
    """Say which weights the wrong tensors are, if they are known."""
    if before is not None and all(before.digests.get(name) == theirs[name] for name in wrong):
        return [f"these are still the weights of version {before.version}"]
    owners = {value: name for name, value in ours.items()}
    exchanged = [f"{name} holds {owners[theirs[name]]}" for name in wrong if theirs[name] in owners]
    return [f"tensors are exchanged: {listed(exchanged)}"] if exchanged else []


def wrong_scores(expected: Expected, answer: Answer) -> list[str]:
    """Return the message about log-probabilities of the probe that differ from the learner's."""
    gap = difference(expected.logprobs, answer.logprobs)
    if gap <= expected.bound:
        return []
    return [
        f"the probe's {len(expected.logprobs)} log-probabilities differ from the learner's by up to {gap:.2g} "
        f"(bound {expected.bound:.1g})"
    ]


def listed(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
