"""The verdict on a transfer: a server's answers compared with the learner's, bit for bit and within a bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import attrs

from agentrig.delivery.asking import Answer

EPSILON = 2.0**-23
"""The distance between two neighboring fp32 numbers, relative to their size."""

SHOWN = 4
"""How many tensors a message names."""


class Learner(Protocol):
    """What an algorithm reports about the model that it trains, in evaluation mode.

    Attributes:
        layers: How many blocks the model has: rounding errors grow with their number.
    """

    layers: int

    def logprobs(self, ids: Sequence[int], *, temperature: float = 1.0) -> Sequence[float]:
        """Return the log-probabilities of all tokens except the first, computed as in training.

        Empty for tokens other than the probe if it cannot score them now. What a server samples is then compared with
        the server's own new scores of it, for which the server's temperature must be 1.
        """
        ...

    def digests(self, dtype: str) -> Mapping[str, str]:
        """Return name to digest (`agentrig.delivery.digests`) of the weights, rounded to the server's dtype.

        Empty if the algorithm cannot compute them.
        """
        ...

    def spread(self, ids: Sequence[int], dtype: str) -> float:
        """Return how much the tokens' log-probabilities change if the server's dtype is used instead of fp32."""
        ...


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
    ids: Sequence[int]
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


def measured(learner: Learner, ids: Sequence[int], dtype: str) -> tuple[float, str]:
    """Return what rounding and chance change in the probe's log-probabilities, and a note if the model has any chance.

    The bound of differences is `rounding` plus twice this.
    """
    spread, first = learner.spread(ids, dtype), learner.logprobs(ids)
    chance = difference(first, learner.logprobs(ids))
    if chance <= rounding(first, learner.layers):
        return spread, ""
    note = "the model is not deterministic: two scorings of the probe by the learner differ by more than rounding"
    return spread + chance, f"{note}, which widens the bound of the proof of delivery"


def compare(
    expected: Expected,
    before: Expected | None,
    answers: Sequence[Answer],
    digests: Mapping[str, str],
    *,
    temperature: float,
    right: Callable[[tuple[int, ...]], Sequence[float]],
) -> tuple[list[str], float | None]:
    """Compare a server with the learner.

    Args:
        before: Its answer at the transfer before.
        answers: The server's answers, the first with scores of the probe; empty for one that cannot score.
        digests: Name to digest of the server's tensors; empty if they are not known.
        right: Returns the log-probabilities that sampled tokens should have at this temperature.

    Returns:
        What is wrong, as lines of a message, and the largest difference of a log-probability; None without answers.
    """
    dtype = answers[0].dtype if answers else ""
    tensors = _wrong_tensors(expected, before, digests, dtype) if digests and expected.digests else []
    if not answers:
        return tensors, None
    first, wrong = answers[0], []
    if first.version not in (None, expected.version):
        wrong.append(
            f"it answers with the weights of version {first.version}; the learner's are version {expected.version}"
        )
    wrong += tensors
    if not all(map(math.isfinite, expected.logprobs)):
        wrong.append("the learner's own log-probabilities are not finite: its weights hold NaN or infinity")
    gap = difference(expected.logprobs, first.logprobs)
    if not gap <= expected.bound < math.inf:
        pairs = enumerate(zip(expected.logprobs, first.logprobs, strict=False), 2)  # the first token has none
        far = [token for token, (ours, theirs) in pairs if not abs(ours - theirs) <= expected.bound]
        wrong.append(
            f"the probe's {len(expected.logprobs)} log-probabilities differ from the learner's by up to {gap:.2g} "
            f"(bound {expected.bound:.1g})"
            + (f", {len(far)} of them by more than the bound, first that of token {far[0]}" if far else "")
        )
    others = [answer.version for answer in answers if answer.version != first.version]
    if others:
        wrong.append(
            f"of {len(answers)} requests to this address some were answered with version {first.version} and some "
            f"with version {others[0]}: several servers are behind it, and one has old weights"
        )
        return wrong, gap
    sampled, known = 0.0, right(first.tokens)
    for answer in answers:
        n = len(answer.tokens)  # the others have fewer
        ours = known[:n] if answer.tokens == first.tokens[:n] else right(answer.tokens)
        sampled = max(sampled, difference(ours, answer.sampled))
    if not sampled <= expected.bound < math.inf:
        cause = (
            "its weights and its scores of the probe are right: either its prefix cache still has keys and values of "
            f"older weights, or its log-probabilities are not those of temperature {temperature:g}"
        )
        what = "the tokens that it samples after the probe have log-probabilities that differ from the learner's by "
        wrong += [f"{what}up to {sampled:.2g} (bound {expected.bound:.1g})", *([] if wrong else [cause])]
    return wrong, max(gap, sampled)


def _wrong_tensors(expected: Expected, before: Expected | None, theirs: Mapping[str, str], dtype: str) -> list[str]:
    """Return messages about tensors that differ from the learner's."""
    ours, words = expected.digests, []
    if dtype and dtype != expected.dtype:
        words.append(f"it computes in {dtype}; the run's dtype is {expected.dtype}")
    present = set(theirs.values())
    missing = [name for name, value in ours.items() if name not in theirs and value not in present]
    unknown = [name for name in theirs if name not in ours]
    wrong = [name for name, value in theirs.items() if name in ours and ours[name] != value]
    if missing:
        words.append(f"it has no {_listed(missing)}")
    if unknown:
        words.append(f"it computes with {_listed(unknown)}, which the learner does not have")
    if wrong:
        words.append(f"{len(wrong)} of {len(theirs)} tensors differ from the learner's: {_listed(wrong)}")
        owners = {value: name for name, value in ours.items()}
        exchanged = [f"{name} holds {owners[theirs[name]]}" for name in wrong if theirs[name] in owners]
        if before is not None and all(before.digests.get(name) == theirs[name] for name in wrong):
            words.append(f"these are still the weights of version {before.version}")
        elif exchanged:
            words.append(f"tensors are exchanged: {_listed(exchanged)}")
    return words


def _listed(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
