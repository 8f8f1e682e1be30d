"""The proof of each transfer: choose the probe, query the servers, compare with the learner, keep the figures.

The servers are queried in the background while the run continues, and then the learner, which the run does not use
between a transfer and the verdict. The run's own thread gives the verdict.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrig.delivery import probe as probes
from agentrig.delivery import verdict
from agentrig.delivery.asking import Answer, Asked, Background, CannotAnswer, CannotScore, Client, at_once
from agentrig.delivery.judging import Bounds, Learner, Ours, judge
from agentrig.delivery.probe import Probe
from agentrig.delivery.record import Record, sign
from agentrig.delivery.verdict import Expected
from agentrig.endpoints import Endpoint
from agentrig.errors import RunStopped
from agentrig.rollouts import Rollout

log = logging.getLogger(__name__)

Answers = tuple[Endpoint, Asked | CannotScore | None, Mapping[str, str]]
"""An address, its answers or why it has none, and the digests of its tensors if they were read in another way."""

CURE = (
    "What is sampled from now on would not be the policy that is trained. Look at the server's log, and resume from "
    "the last checkpoint: agentrig train --resume"
)


class Delivery:
    """The proofs of one run.

    Args:
        directory: The run directory, where the probe is kept.
        on: False makes every method do nothing.
        lines: The lines of `metrics.jsonl` so far.
    """

    def __init__(self, directory: Path, *, on: bool = True, lines: Sequence[Mapping[str, Any]] = ()) -> None:
        self.on = on
        self.record = Record.after(lines, on=on)
        self._file = directory / probes.FILE
        self._probe: Probe | None = None
        self._client = Client()
        self._expected: Expected | None = None
        self._bounds = Bounds(self.record)
        self._ids: Sequence[int] = ()
        self._context = 0
        self._pending: tuple[int, Sequence[int], Background[tuple[list[Answers], Ours]]] | None = None
        self._using, self._ended = threading.Lock(), False
        self._cached: Background[None] | None = None
        self._unproven = False
        self.weaker = ""

    # --- the probe --------------------------------------------------------------------------------

    def offer(self, rollouts: Sequence[Rollout]) -> None:
        """Take the probe from recorded calls, unless the run has such a probe already."""
        if not self.on or (self._kept() is not None and self._kept().recorded):  # type: ignore[union-attr]
            return
        found = probes.recorded_probe(rollouts)
        if found is not None:
            self._keep(found)

    def probe(self, *, context: int, prompt: Callable[[], Sequence[int]]) -> Sequence[int]:
        """Return the tokens of the next proof; see `prove` for the arguments."""
        if self._kept() is None:
            self._keep(Probe(ids=prompt(), source="a task's prompt", recorded=False))
        assert self._probe is not None
        self._context = context
        return self._probe.fitted(context).ids

    def _kept(self) -> Probe | None:
        if self._probe is None:
            self._probe = probes.load(self._file)
        return self._probe

    def _keep(self, probe: Probe) -> None:
        self._probe = probe
        if probe.recorded:  # a task's prompt is there again, and a run that resumes has changed nothing yet
            probes.save(probe, self._file)

    # --- a transfer -------------------------------------------------------------------------------

    def prepare(self, servers: Sequence[Endpoint], *, wait: bool = True) -> None:
        """Put the probe into the servers' prefix caches; call it before a transfer.

        If a server then fails to clear the keys and values of the old weights, the proof detects it.

        Args:
            servers: The addresses that will get weights.
            wait: False only starts it, for example before an update; the next call with True waits for it.

        Raises:
            RunStopped: The proof of the previous transfer has failed.
        """
        self.settle()
        probe = self._kept() if self.on and not self.weaker else None
        if probe is None or self._expected is None:
            return
        start = time.perf_counter()
        if self._cached is None:
            ids = probe.fitted(self._context).ids
            self._cached = Background(lambda: self._cache(servers, ids))
        if wait:
            cached, self._cached = self._cached, None
            cached.result()
        self.record.seconds += time.perf_counter() - start

    def _cache(self, servers: Sequence[Endpoint], ids: Sequence[int]) -> None:
        def cache(server: Endpoint) -> None:
            try:
                self._client.sample(server, ids, n=1, temperature=1.0)
            except (CannotScore, CannotAnswer) as error:
                log.debug("the probe could not be put into the cache of %s: %s", server.base_url, error)

        at_once(cache, servers)

    def begin(
        self,
        *,
        version: int,
        learner: Learner,
        servers: Sequence[Endpoint],
        context: int,
        prompt: Callable[[], Sequence[int]],
        held: Callable[[], Sequence[Mapping[str, str]] | None] | None = None,
        fresh: bool = False,
    ) -> None:
        """Begin to prove that each server answers with the learner's weights; call it after every transfer.

        The servers are queried in the background, and there the learner answers too. `settle` gives the verdict. Call
        it before the learner's model is used or changed, and before the servers end. `Session.rollouts`, `prepare`,
        `begin` and `sign` call it.

        Args:
            version: The version of the weights: the step that made them.
            learner: The model that is trained; used in another thread until `settle` returns.
            servers: The addresses that got the weights, with the sampling settings of training.
            context: The servers' context in tokens.
            prompt: Returns the token ids of a task's prompt, for a run that has recorded no call yet.
            held: Returns the digests of the tensors that each server uses, for servers that don't report them in
                their answers; None where it can't know. Called in the background.
            fresh: Compare the tokens that a server samples with its own new scores of them, for a learner that cannot
                score them; the servers' temperature must be 1.

        Raises:
            RunStopped: The proof of the previous transfer has failed.
        """
        self.settle()
        if not self.on:
            return
        start = time.perf_counter()
        ids, weaker = self.probe(context=context, prompt=prompt), bool(self.weaker)

        def ask() -> tuple[list[Answers], Ours]:
            digests = (held() if held is not None else None) or [{}] * len(servers)
            asked = at_once(lambda server: None if weaker else self._asked(server, ids, fresh), servers)
            with self._using:
                if self._ended:
                    raise RunStopped("the run has ended")
                ours = Ours(
                    version=version, learner=learner, ids=ids, fresh=fresh, servers=servers, asked=asked,
                    bounds=self._bounds, client=self._client,
                )  # fmt: skip
            return list(zip(servers, asked, digests, strict=True)), ours

        self._pending = version, ids, Background(ask)
        self.record.seconds += time.perf_counter() - start

    def end(self) -> None:
        """Wait until the background no longer uses the learner, and keep it from it; the run calls this at its end.

        A process must not end while another of its threads computes.
        """
        self._ended = True
        with self._using:
            pass

    def _asked(self, server: Endpoint, ids: Sequence[int], fresh: bool) -> Asked | CannotScore:
        try:
            return self._client.ask(server, ids, fresh=fresh)
        except CannotScore as error:
            return error

    def settle(self) -> None:
        """Wait for the proof that has begun and give its verdict; without one, do nothing.

        Raises:
            RunStopped: A server answers with other weights than the learner's; the message says with which.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        start = time.perf_counter()
        version, ids, found = pending
        self.record.begin(version)
        try:
            (asked, ours), background = found.result()
        except CannotAnswer as error:
            raise RunStopped(f"step {version}: the model server {error}", cause="server-failed") from error
        for server, answers, known in asked:
            self._one(server, answers, known, ours)
        self._expected, self._ids = ours.expected, ids
        if self.weaker:
            self._unproven = True
        else:
            self.record.proven()
        self.record.background += background
        self.record.seconds += time.perf_counter() - start

    def prove(
        self,
        *,
        version: int,
        learner: Learner,
        servers: Sequence[Endpoint],
        context: int,
        prompt: Callable[[], Sequence[int]],
        held: Callable[[], Sequence[Mapping[str, str]] | None] | None = None,
    ) -> None:
        """Call `begin` and `settle`: check that each server answers with the learner's weights.

        Raises:
            RunStopped: A server answers with other weights; the message says with which.
        """
        self.begin(version=version, learner=learner, servers=servers, context=context, prompt=prompt, held=held)
        self.settle()

    def _one(self, server: Endpoint, found: Asked | CannotScore | None, known: Mapping[str, str], ours: Ours) -> None:
        """Give the verdict on one address."""
        words: list[str] = []
        if isinstance(found, CannotScore):
            self.weaker = (
                f"the server {server.base_url} cannot score given tokens ({found}); the weaker proof is used: the "
                "log-probabilities of sampled calls must be the learner's"
            )
            self.record.say(self.weaker)
        elif found is not None:
            words = judge(server, found, known, ours, self._expected, self._bounds, self.record)
        if self.weaker and known:
            words = verdict.wrong_tensors(ours.expected, Answer(version=None, digests=known), self._expected)
        if words:
            version = ours.expected.version
            raise RunStopped(
                f"step {version}: the weights of version {version} did not arrive at {server.base_url}:\n"
                + "\n".join(f"  {line}" for line in words)
                + f"\n  {CURE}",
                cause="weights-not-arriving",
            )

    def summary(self) -> dict[str, Any]:
        """Return the entry of `summary.json`. A transfer without a verdict counts as one that did not arrive."""
        found = self.record.summary()
        return {**found, "proofs": found["proofs"] + (self._pending is not None)}

    # --- sampled calls ----------------------------------------------------------------------------

    def sampled(self, *, step: int, difference: float, call: str, dtype: str, version: int | None = None) -> None:
        """Make sure that the log-probabilities recorded with a step's calls are the learner's, before its update.

        Without a proof of delivery (`run.delivery = false`) the bound is the difference that the dtype explains.

        Args:
            step: The training step.
            difference: The mean absolute difference over the tokens of the call that differs most.
            call: Which call that is, as text.
            dtype: The dtype in which learner and server compute.
            version: Version of the learner's weights that were compared, those that sampled; None for `step - 1`.

        Raises:
            RunStopped: They differ: the server sampled from another policy, or the tokens are not those of the call.
        """
        bound = self.calls_bound(dtype)
        self.record.calls(difference, bound)
        if difference <= bound:
            if self._unproven:
                self._unproven = False
                self.record.proven()
            return
        behind = version is not None and version < step - 1
        compared = "In this comparison the learner" if behind else "The learner"
        weights = f"the weights of version {version if behind else step - 1}"
        raise RunStopped(
            f"step {step}: what is trained is not what was sampled. The log-probabilities recorded with {call} differ "
            f"from the learner's by {difference:.2g} on average over its tokens (bound {bound:.1g}).\n  {compared} "
            f"has {weights}, with which the rollouts were made. Either the "
            "server sampled with other weights, another prefix or another temperature, or the adapter changed the "
            "tokens of the call.\n  Look at the call with: agentrig dev. " + CURE,
            cause="sampled-differently",
        )

    def calls_bound(self, dtype: str) -> float:
        """Return the largest mean difference of a call's log-probabilities that is no fault.

        It is four times the probe's bound, as the tokens differ.
        """
        if self._expected is None:
            return verdict.CALLS[dtype]
        return max(1e-3, 4 * self._expected.bound)

    def sign(self, checkpoint: Path) -> None:
        """Write the learner's log-probabilities of the probe into a checkpoint, for `agentrig export`.

        Raises:
            RunStopped: The proof of the latest transfer has failed.
        """
        self.settle()
        if self.on and self._expected is not None:
            sign(checkpoint, self._ids, self._expected)
