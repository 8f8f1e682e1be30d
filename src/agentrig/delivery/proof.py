"""The proof of each transfer: choose the probe, ask the servers, compare with the learner, keep the figures."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs

from agentrig.delivery import probe as probes
from agentrig.delivery import verdict
from agentrig.delivery.asking import Answer, CannotAnswer, CannotScore, Client
from agentrig.delivery.probe import Probe
from agentrig.delivery.record import Record, sign
from agentrig.delivery.verdict import Expected
from agentrig.endpoints import Endpoint
from agentrig.errors import RunStopped
from agentrig.rollouts import Rollout

log = logging.getLogger(__name__)

ASKED = 3
"""How often each address is asked in a proof: behind one address there may be several servers."""

SCORINGS = 4
"""How often the learner scores the probe of a model that turned out not to be deterministic."""

CURE = (
    "What is sampled from now on would not be the policy that is trained. Look at the server's log, and resume from "
    "the last checkpoint: agentrig train --resume"
)


class Learner(Protocol):
    """What an algorithm tells of the model that it trains, in evaluation mode.

    Attributes:
        layers: How many blocks the model has: rounding grows with them.
        dtype: What the server computes in: `float32`, `bfloat16` …
    """

    layers: int
    dtype: str

    def logprobs(self, ids: Sequence[int], *, temperature: float = 1.0) -> Sequence[float]:
        """Return the log-probabilities of all tokens but the first, computed as in training."""
        ...

    def digests(self) -> Mapping[str, str]:
        """Return name to digest (`agentrig.delivery.digests`) of the weights, rounded to the server's dtype.

        Empty where they can't be known.
        """
        ...

    def spread(self, ids: Sequence[int]) -> float:
        """Return how much the tokens' log-probabilities change by computing in the server's dtype instead of fp32."""
        ...


class Delivery:
    """The proofs of one run.

    Args:
        directory: The run directory, where the probe is kept.
        on: False makes every method do nothing.
        lines: The lines of `metrics.jsonl` so far.
    """

    def __init__(self, directory: Path, *, on: bool = True, lines: Sequence[Mapping[str, Any]] = ()) -> None:
        self.on = on
        self._file = directory / probes.FILE
        self._probe: Probe | None = None
        self._client = Client()
        self._expected: Expected | None = None
        self._spread: float | None = None
        self._noise = 0.0
        self._ids: Sequence[int] = ()
        self._unproven = False
        self.weaker = ""
        self.record = Record.after(lines, on=on)

    # --- the probe --------------------------------------------------------------------------------

    def offer(self, rollouts: Sequence[Rollout]) -> None:
        """Take the probe from recorded calls, unless it has been taken already."""
        if not self.on or (self._kept() is not None and self._kept().recorded):  # type: ignore[union-attr]
            return
        found = probes.recorded_probe(rollouts)
        if found is not None:
            self._keep(found)

    def probe(self, *, context: int, prompt: Callable[[], Sequence[int]]) -> Sequence[int]:
        """Return the tokens that the next proof asks about; see `prove` for the arguments."""
        if self._kept() is None:
            self._keep(Probe(ids=prompt(), source="a task's prompt", recorded=False))
        assert self._probe is not None
        self._ids = self._probe.fitted(context).ids
        return self._ids

    def _kept(self) -> Probe | None:
        if self._probe is None:
            self._probe = probes.load(self._file)
        return self._probe

    def _keep(self, probe: Probe) -> None:
        self._probe, self._spread = probe, None
        probes.save(probe, self._file)

    # --- a transfer -------------------------------------------------------------------------------

    def prepare(self, servers: Sequence[Endpoint]) -> None:
        """Put the probe into the servers' prefix caches; call it just before a transfer.

        Keys and values of the old weights that a server keeps by mistake can then be seen after it.
        """
        probe = self._kept() if self.on and not self.weaker else None
        if probe is None or self._expected is None:
            return
        start = time.perf_counter()
        for server in servers:
            try:
                self._client.sample(server, self._ids, n=1, temperature=1.0)
            except (CannotScore, CannotAnswer) as error:
                log.debug("the probe could not be put into the cache of %s: %s", server.base_url, error)
        self.record.seconds += time.perf_counter() - start

    def prove(
        self,
        *,
        version: int,
        learner: Learner,
        servers: Sequence[Endpoint],
        context: int,
        prompt: Callable[[], Sequence[int]],
        held: Callable[[], Sequence[Mapping[str, str]]] | None = None,
    ) -> None:
        """Make sure that each server answers with the learner's weights; call it after every transfer.

        Args:
            version: Of the weights: the step that made them.
            learner: The model that is trained.
            servers: The addresses that were given the weights, with the sampling of training.
            context: The servers' context in tokens.
            prompt: Returns the token ids of a task's prompt, for a run that has recorded no call yet.
            held: Returns the digests of the tensors that each server computes with, for servers that don't tell
                in their answers.

        Raises:
            RunStopped: A server answers with something else; the message says with what.
        """
        if not self.on:
            return
        start = time.perf_counter()
        self.probe(context=context, prompt=prompt)
        before, expected = self._expected, self._expect(version, learner)
        digests = held() if held is not None else [{}] * len(servers)
        self.record.begin(expected)
        for server, known in zip(servers, digests, strict=True):
            self._one(server, known, expected, before, learner)
        self._expected = expected
        if self.weaker:
            self._unproven = True
        else:
            self.record.proven()
        self.record.seconds += time.perf_counter() - start

    def _expect(self, version: int, learner: Learner) -> Expected:
        logprobs = learner.logprobs(self._ids)
        if self._spread is None:
            self._measure(learner, logprobs)
        return Expected(
            version=version,
            logprobs=logprobs,
            digests=learner.digests(),
            dtype=learner.dtype,
            bound=self._bound(learner, logprobs),
        )

    def _bound(self, learner: Learner, logprobs: Sequence[float]) -> float:
        assert self._spread is not None
        return verdict.rounding(logprobs, learner.layers) + 2 * self._spread + 2 * self._noise

    def _measure(self, learner: Learner, logprobs: Sequence[float]) -> None:
        """Measure what the dtype explains, and whether the model says the same twice."""
        self._spread = learner.spread(self._ids)
        allowed = verdict.rounding(logprobs, learner.layers)
        noise = verdict.difference(logprobs, learner.logprobs(self._ids))
        if noise <= allowed:
            return
        again = [learner.logprobs(self._ids) for _ in range(SCORINGS)]
        noise = max(noise, *(verdict.difference(logprobs, found) for found in again))
        first, self._noise = not self._noise, max(noise, self._noise)
        if first:
            self.record.say(
                f"the model is not deterministic: two scorings of the probe by the learner differ by {noise:.2g}, "
                "which widens the bound of the proof of delivery"
            )

    def _one(
        self, server: Endpoint, known: Mapping[str, str], expected: Expected, before: Expected | None, learner: Learner
    ) -> None:
        """Prove one address."""
        words: list[str] = []
        try:
            if not self.weaker:
                words = self._scored(server, known, expected, before, learner)
        except CannotScore as error:
            self.weaker = (
                f"the server {server.base_url} cannot score given tokens ({error}); the weaker proof is used: the "
                "log-probabilities of sampled calls must be the learner's"
            )
            self.record.say(self.weaker)
        except CannotAnswer as error:
            raise RunStopped(f"step {expected.version}: the model server {error}") from error
        if self.weaker and known:
            words = verdict.wrong_tensors(expected, Answer(version=None, digests=known), before)
        if words:
            raise RunStopped(
                f"step {expected.version}: the weights of version {expected.version} did not arrive at "
                f"{server.base_url}:\n" + "\n".join(f"  {line}" for line in words) + f"\n  {CURE}"
            )

    def _scored(
        self, server: Endpoint, known: Mapping[str, str], expected: Expected, before: Expected | None, learner: Learner
    ) -> list[str]:
        temperature = float(server.sampling.get("temperature", 1.0))
        answer = self._client.score(server, self._ids)
        if known:
            answer = attrs.evolve(answer, digests=known)
        if verdict.wrong_scores(expected, answer):
            # The model has moved since its dtype's spread was measured.
            self._measure(learner, expected.logprobs)
            expected = attrs.evolve(expected, bound=self._bound(learner, expected.logprobs))
        words = verdict.wrong_version(expected, answer)
        words += verdict.wrong_tensors(expected, answer, before)
        words += verdict.wrong_scores(expected, answer)
        self.record.compared(verdict.difference(expected.logprobs, answer.logprobs), len(answer.digests), expected)
        first: Answer | None = None
        for turn in range(ASKED):
            n = 1 if turn else probes.SAMPLED
            sampled = self._client.sample(server, self._ids, n=n, temperature=temperature)
            if first is not None and sampled.tokens == first.tokens[:1]:
                gap = verdict.difference(first.sampled[:1], sampled.sampled)
            else:
                gap = self._gap(sampled, learner, temperature)
            self.record.compared(gap, 0, expected)
            if sampled.version != answer.version:
                words.append(
                    f"of {ASKED + 1} requests to this address some were answered with version {answer.version} and "
                    f"some with version {sampled.version}: several servers are behind it, and one has old weights"
                )
                break
            if gap > expected.bound:
                words += self._sampled_otherwise(gap, expected, words, temperature)
                break
            first = first or sampled
        return words

    def _gap(self, sampled: Answer, learner: Learner, temperature: float) -> float:
        ours = learner.logprobs([*self._ids, *sampled.tokens], temperature=temperature)
        return verdict.difference(ours[len(self._ids) - 1 :], sampled.sampled)

    def _sampled_otherwise(self, gap: float, expected: Expected, words: Sequence[str], temperature: float) -> list[str]:
        found = (
            f"the tokens that it samples after the probe have log-probabilities that differ from the learner's by up "
            f"to {gap:.2g} (bound {expected.bound:.1g})"
        )
        if words:
            return [found]
        return [
            found,
            "its weights and its scores of the probe are right: either its prefix cache still has keys and values of "
            f"older weights, or its log-probabilities are not those of temperature {temperature:g}",
        ]

    # --- sampled calls ----------------------------------------------------------------------------

    def sampled(self, *, step: int, difference: float, call: str) -> None:
        """Make sure that the log-probabilities recorded with a step's calls are the learner's, before its update.

        Args:
            step: The training step.
            difference: Of the call that differs most, the mean absolute difference over its tokens.
            call: Which call that is, as text.

        Raises:
            RunStopped: They are not: the server sampled from another policy, or the tokens are not those of the call.
        """
        if not self.on or self._expected is None:
            return
        bound = self.calls_bound
        self.record.calls(difference, bound)
        if difference <= bound:
            if self._unproven:
                self._unproven = False
                self.record.proven()
            return
        raise RunStopped(
            f"step {step}: what is trained is not what was sampled. The log-probabilities recorded with {call} differ "
            f"from the learner's by {difference:.2g} on average over its tokens (bound {bound:.1g}).\n  The learner "
            f"has the weights of version {self._expected.version}, with which the rollouts were made. Either the "
            "server sampled with other weights, another prefix or another temperature, or the adapter changed the "
            "tokens of the call.\n  Look at the call with: agentrig dev. " + CURE
        )

    @property
    def calls_bound(self) -> float:
        """Largest mean difference of a call's log-probabilities: four times the probe's, for they are other tokens."""
        return max(1e-3, 4 * self._expected.bound) if self._expected is not None else 0.0

    def sign(self, checkpoint: Path) -> None:
        """Write what the learner says of the probe into a checkpoint, for `agentrig export`."""
        if self.on and self._expected is not None:
            sign(checkpoint, self._ids, self._expected)
