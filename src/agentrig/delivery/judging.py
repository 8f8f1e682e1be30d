"""Compares the answers of an address after a transfer with those of the learner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import attrs

from agentrig.delivery import verdict
from agentrig.delivery.asking import Answer, Asked, CannotScore, Client
from agentrig.delivery.record import Record
from agentrig.delivery.verdict import Expected
from agentrig.endpoints import Endpoint

SCORINGS = 4
"""How often the learner scores the probe of a model that turned out not to be deterministic."""


class Learner(Protocol):
    """What an algorithm reports about the model that it trains, in evaluation mode.

    Attributes:
        layers: How many blocks the model has: rounding errors grow with their number.
        dtype: The dtype in which the server computes: `float32`, `bfloat16` …
    """

    layers: int
    dtype: str

    def logprobs(self, ids: Sequence[int], *, temperature: float = 1.0) -> Sequence[float]:
        """Return the log-probabilities of all tokens except the first, computed as in training."""
        ...

    def digests(self) -> Mapping[str, str]:
        """Return name to digest (`agentrig.delivery.digests`) of the weights, rounded to the server's dtype.

        Empty if the algorithm cannot compute them.
        """
        ...

    def spread(self, ids: Sequence[int]) -> float:
        """Return how much the tokens' log-probabilities change if the server's dtype is used instead of fp32."""
        ...


class Bounds:
    """Bounds of differences: the effect of the dtype and of a model that is not deterministic, measured once a probe.

    Args:
        record: Gets a note if the model is not deterministic.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._ids: Sequence[int] = ()
        self._spread = self._noise = 0.0

    def bound(self, learner: Learner, ids: Sequence[int], logprobs: Sequence[float], *, again: bool = False) -> float:
        """Return the largest difference of a log-probability that is no fault.

        Args:
            learner: The learner.
            ids: The probe.
            logprobs: The probe's log-probabilities under the learner.
            again: Measure again: the weights have changed since.
        """
        if again or list(ids) != list(self._ids):
            self._ids, self._spread = ids, self._measure(learner, ids)
        return verdict.rounding(logprobs, learner.layers) + 2 * self._spread + 2 * self._noise

    def _measure(self, learner: Learner, ids: Sequence[int]) -> float:
        # Scored twice here: the passes of other lengths round in other ways.
        spread, logprobs = learner.spread(ids), learner.logprobs(ids)
        noise = verdict.difference(logprobs, learner.logprobs(ids))
        if noise > verdict.rounding(logprobs, learner.layers):
            more = [learner.logprobs(ids) for _ in range(SCORINGS)]
            noise = max(noise, *(verdict.difference(logprobs, found) for found in more))
            first, self._noise = not self._noise, max(noise, self._noise)
            if first:
                self._record.say(
                    f"the model is not deterministic: two scorings of the probe by the learner differ by {noise:.2g}, "
                    "which widens the bound of the proof of delivery"
                )
        return spread


class Ours:
    """The learner's log-probabilities of the probe and of the tokens sampled after it, in one pass if possible.

    Args:
        version: The version of the weights.
        learner: The learner.
        ids: The probe.
        fresh: Whether samples are compared with the server's own new scores of them.
        servers: The addresses.
        asked: The answers of each address.
        bounds: The run's bounds.
        client: Requests scores from a server if the learner cannot compute them.

    Attributes:
        expected: The learner's answer to the probe.
    """

    def __init__(
        self,
        *,
        version: int,
        learner: Learner,
        ids: Sequence[int],
        fresh: bool,
        servers: Sequence[Endpoint],
        asked: Sequence[Asked | CannotScore | None],
        bounds: Bounds,
        client: Client,
    ) -> None:
        self.learner, self.ids = learner, ids
        self._fresh, self._client = fresh, client
        self._samples: dict[tuple[float, tuple[int, ...]], Sequence[float]] = {}
        logprobs = self._probe(servers, asked)
        self.expected = Expected(
            version=version,
            logprobs=logprobs,
            digests=learner.digests(),
            dtype=learner.dtype,
            bound=bounds.bound(learner, ids, logprobs),
        )
        if not fresh:
            for server, found in zip(servers, asked, strict=True):
                for sampled in (found.answer, *found.others) if isinstance(found, Asked) else ():
                    _gap(sampled, found, self, server)  # type: ignore[arg-type]

    def _probe(self, servers: Sequence[Endpoint], asked: Sequence[Asked | CannotScore | None]) -> Sequence[float]:
        for server, found in zip(servers, asked, strict=True):
            if not self._fresh and isinstance(found, Asked) and temperature_of(server) == 1.0:
                whole = self.learner.logprobs([*self.ids, *found.answer.tokens])
                self._samples[1.0, found.answer.tokens] = whole[len(self.ids) - 1 :]
                return whole[: len(self.ids) - 1]
        return self.learner.logprobs(self.ids)

    def samples(self, server: Endpoint, tokens: tuple[int, ...]) -> Sequence[float]:
        """Return the expected log-probabilities of tokens that a server sampled after the probe."""
        whole, temperature = [*self.ids, *tokens], temperature_of(server)
        if self._fresh:
            return self._client.score(server, whole).logprobs[len(self.ids) - 1 :]
        if (temperature, tokens) not in self._samples:
            found = self.learner.logprobs(whole, temperature=temperature)
            self._samples[temperature, tokens] = found[len(self.ids) - 1 :]
        return self._samples[temperature, tokens]


def judge(
    server: Endpoint,
    asked: Asked,
    known: Mapping[str, str],
    ours: Ours,
    before: Expected | None,
    bounds: Bounds,
    record: Record,
) -> list[str]:
    """Return what is wrong with the answers of an address; empty if the weights have arrived.

    Args:
        server: The address.
        asked: Its answers.
        known: The digests of its tensors, if they were read in another way.
        ours: The learner's log-probabilities.
        before: The learner's answer of the previous transfer.
        bounds: The run's bounds.
        record: Gets the figures.
    """
    answer = attrs.evolve(asked.answer, digests=known) if known else asked.answer
    expected = ours.expected
    if verdict.wrong_scores(expected, answer):
        # The weights have changed since the effect of rounding was measured.
        bound = bounds.bound(ours.learner, ours.ids, expected.logprobs, again=True)
        expected = ours.expected = attrs.evolve(expected, bound=bound)
    words = verdict.wrong_version(expected, answer)
    words += verdict.wrong_tensors(expected, answer, before)
    words += verdict.wrong_scores(expected, answer)
    record.compared(verdict.difference(expected.logprobs, answer.logprobs), len(answer.digests), expected)
    others = [version for version in asked.versions if version != answer.version]
    if others:
        return [
            *words,
            f"of {len(asked.versions)} requests to this address some were answered with version {answer.version} and "
            f"some with version {others[0]}: several servers are behind it, and one has old weights",
        ]
    for sampled in (answer, *asked.others):
        gap = _gap(sampled, asked, ours, server)
        record.compared(gap, 0, expected)
        if gap > expected.bound:
            return words + _sampled_otherwise(gap, expected, words, temperature_of(server))
    return words


def temperature_of(server: Endpoint) -> float:
    """Return the sampling temperature of an address."""
    return float(server.sampling.get("temperature", 1.0))


def _gap(sampled: Answer, asked: Asked, ours: Ours, server: Endpoint) -> float:
    if sampled is not asked.answer and sampled.tokens == asked.answer.tokens[:1]:
        return verdict.difference(asked.answer.sampled[:1], sampled.sampled)
    first = sampled.tokens == asked.answer.tokens
    right = asked.fresh if asked.fresh and first else ours.samples(server, sampled.tokens)
    return verdict.difference(right, sampled.sampled)


def _sampled_otherwise(gap: float, expected: Expected, words: Sequence[str], temperature: float) -> list[str]:
    found = (
        f"the tokens that it samples after the probe have log-probabilities that differ from the learner's by up to "
        f"{gap:.2g} (bound {expected.bound:.1g})"
    )
    if words:
        return [found]
    return [
        found,
        "its weights and its scores of the probe are right: either its prefix cache still has keys and values of "
        f"older weights, or its log-probabilities are not those of temperature {temperature:g}",
    ]
