"""The proof of each transfer: choose the probe, query the servers, compare with the learner, keep the figures.

Servers and learner answer in the background while the run continues, and does not use the learner. `settle` gives the
verdict in the run's own thread.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import attrs

from agentrig.background import in_background
from agentrig.delivery.asking import Answer, CannotAnswer, CannotScore, ask
from agentrig.delivery.exported import sign
from agentrig.delivery.verdict import Expected, Learner, compare, measured, rounding
from agentrig.endpoints import Endpoint
from agentrig.errors import RunFileError, RunStopped, memory_named
from agentrig.rollouts import Rollout
from agentrig.text import read_text
from agentrig.traces import SERVER

log = logging.getLogger(__name__)

T = TypeVar("T")

LIMIT = 256
"""Most tokens of a probe."""

SAMPLED = 4
"""Tokens that the server samples after the probe: the first from the prompt's pass, the others from decode steps."""

ASKED = 4
"""Requests to each address in a proof: there may be several servers behind one address."""

CALLS: Mapping[str, float] = {"float32": 0.02, "bfloat16": 0.8, "float16": 0.8}
"""Largest mean difference of the recorded log-probabilities in a dtype, in nats, where nothing was measured."""

LESS_BESIDE = (
    "The learner scores a few tokens beside its server for it. Give the server less of the device in [server], or "
    "leave the proof out: run.delivery = false"
)

CURE = (
    "What is sampled from now on would not be the policy that is trained. Look at the server's log, and resume from "
    "the last checkpoint: agentrig train --resume"
)


@attrs.define
class Figures:
    """Results of some proofs.

    Attributes:
        version: The version that was proven last.
        proofs: How many transfers were checked.
        arrived: After how many of them the server answered with the learner's weights.
        difference: Largest difference of a log-probability, in nats; None before the first.
        bound: The bound of that proof.
        tensors: How many tensors were compared bit for bit in the last proof; 0 if the server reports no digests.
        calls_difference: The largest mean difference of a step's calls, in nats; None before the first.
        calls_bound: The bound of these calls.
        seconds: How long the run waited for proofs.
        background_s: Seconds that they took in the background.
    """

    version: int | None = None
    proofs: int = 0
    arrived: int = 0
    difference: float | None = None
    bound: float = 0.0
    tensors: int = 0
    calls_difference: float | None = None
    calls_bound: float = 0.0
    seconds: float = 0.0
    background_s: float = 0.0

    def add(self, other: Figures) -> None:
        """Add the figures of later proofs."""
        for name in ("proofs", "arrived", "seconds", "background_s"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.difference is not None and other.difference >= (self.difference or 0.0):
            self.difference, self.bound = other.difference, other.bound
        if other.calls_difference is not None and other.calls_difference >= (self.calls_difference or 0.0):
            self.calls_difference, self.calls_bound = other.calls_difference, other.calls_bound
        self.tensors = other.tensors or self.tensors
        self.version = self.version if other.version is None else other.version


class Delivery:
    """The proofs of one run.

    Args:
        directory: The run directory, where the probe is kept.
        on: False makes every method do nothing but `sampled`.

    Attributes:
        step: The figures since the last `line`.
    """

    def __init__(self, directory: Path, *, on: bool = True, lines: Sequence[Mapping[str, Any]] = ()) -> None:
        self.on = on
        self.step, self._run = Figures(), Figures()
        self._notes: list[str] = []
        for line in lines:
            told = dict(line.get("delivery") or {})
            self._notes += [note for note in told.pop("notes", ()) if note not in self._notes]
            self._run.add(Figures(**told))
        self._file = directory / "probe.json"
        # A run without a step starts over, perhaps with another model, whose tokens are others.
        self._recorded = _kept(self._file) if on and lines else []
        self._choose: Callable[[], Sequence[int]] | None = None
        self._expected: Expected | None = None
        self._spread: tuple[Sequence[int], float] = (), 0.0
        self._pending: tuple[int, Future[tuple[Figures, Expected, str]], bool] | None = None
        self._using, self._ended = threading.Lock(), False
        self._weaker, self._unproven = False, False

    # --- the probe --------------------------------------------------------------------------------

    def offer(self, rollouts: Sequence[Rollout]) -> None:
        """Take the probe from recorded calls, unless the run has such a probe already.

        It is the longest call of at most `LIMIT` tokens, else the shortest.
        """
        if not self.on or self._recorded:
            return
        calls = []
        for call in (call for rollout in rollouts for call in rollout.trace.llm_calls()):
            prompt, response = (call.attributes.get(f"{part}_token_ids") for part in ("prompt", "response"))
            if prompt and response and SERVER not in call.attributes:
                calls.append((len(prompt) + len(response), call.id, [*prompt, *response]))
        if calls:
            self._recorded = max((each for each in calls if each[0] <= LIMIT), default=min(calls))[2]
            part = self._file.with_name(f".{self._file.name}.part")
            part.unlink(missing_ok=True)  # a link would lead out of the run
            part.write_text(json.dumps({"ids": self._recorded}) + "\n", "utf-8")
            os.replace(part, self._file)

    def probe(self, *, context: int, prompt: Callable[[], Sequence[int]]) -> Sequence[int]:
        """Return the tokens of the next proof; see `begin` for the arguments."""
        # It is cut off at its start: the server may score the tokens that it samples too, and samples one more then.
        return (self._recorded or list(prompt()))[-min(LIMIT, context - SAMPLED - 1) :]

    # --- a transfer -------------------------------------------------------------------------------

    def prepare(self, servers: Sequence[Endpoint]) -> None:
        """Put the probe into the servers' prefix caches; call it before a transfer.

        If a server then fails to clear the keys and values of the old weights, the proof detects it.
        """
        self.settle()
        if self._choose is None or self._weaker:
            return
        start, ids = time.perf_counter(), self._choose()

        def cache(server: Endpoint) -> None:
            try:
                ask(server, ids, score=False, n=1, temperature=1.0)
            except (CannotScore, CannotAnswer) as error:
                log.debug("the probe could not be put into the cache of %s: %s", server.base_url, error)

        _at_once(cache, servers)
        self.step.seconds += time.perf_counter() - start

    def begin(
        self,
        *,
        version: int,
        learner: Learner,
        dtype: str,
        servers: Sequence[Endpoint],
        context: int,
        prompt: Callable[[], Sequence[int]],
        held: Callable[[], Sequence[Mapping[str, str]] | None] = lambda: None,
        loaded: bool = False,
    ) -> None:
        """Begin to prove that each server answers with the learner's weights; call it after every transfer.

        Learner and servers answer in the background until `settle` gives the verdict. Call that before the learner's
        model is used or changed, and before the servers end. `Session.rollouts`, `prepare`, `begin` and `signature` do.

        Args:
            version: The version of the weights: the step that made them.
            dtype: What the servers compute in: `float32`, `bfloat16` …
            servers: The addresses that got the weights, with the sampling settings of training.
            context: The servers' context in tokens.
            prompt: Returns the token ids of a task's prompt, for a run that has recorded no call yet.
            held: Returns the digests of the tensors that each server uses, for servers that don't report them in
                their answers; None where it can't know. Called in the background.
            loaded: Whether the servers have loaded the weights themselves: this is no transfer, and is not counted.
        """
        self.settle()
        if self.on:
            self._choose = partial(self.probe, context=context, prompt=prompt)
            ids = self._choose()
            found = in_background(lambda: self._examine(version, learner, dtype, ids, servers, held), "delivery")
            self._pending = version, found, loaded

    def settle(self) -> None:
        """Wait for the proof that has begun and give its verdict; without one, do nothing.

        Raises:
            RunStopped: A server answers with other weights than the learner's; the message says with which.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        start, (version, found, loaded) = time.perf_counter(), pending
        if not loaded:
            self.step.add(Figures(version=version, proofs=1))
        with memory_named(f"step {version}: the proof of delivery", LESS_BESIDE):
            figures, self._expected, wrong = found.result()
        self.step.add(figures)
        if wrong:
            raise RunStopped(wrong, cause="weights-not-arriving")
        if not loaded:
            self._unproven = self._weaker
            self.step.arrived += not self._weaker
        self.step.seconds += time.perf_counter() - start

    def end(self) -> None:
        """Wait until the background no longer uses the learner, and keep it from it; the run calls this at its end.

        A process must not end while another of its threads computes.
        """
        self._ended = True
        with self._using:
            pass

    def signature(self) -> Callable[[Path], None]:
        """Return what writes the learner's log-probabilities of the probe into a checkpoint, for `agentrig export`.

        They are those that were proven up to now; it may be called later, in any thread.

        Raises:
            RunStopped: The proof of the latest transfer has failed.
        """
        self.settle()
        expected = self._expected
        return (lambda checkpoint: None) if expected is None else partial(sign, expected=expected)

    # --- in the background ------------------------------------------------------------------------

    def _examine(
        self,
        version: int,
        learner: Learner,
        dtype: str,
        ids: Sequence[int],
        servers: Sequence[Endpoint],
        held: Callable[[], Sequence[Mapping[str, str]] | None],
    ) -> tuple[Figures, Expected, str]:
        """Ask servers and learner; return the figures, the learner's answer, and a message if they disagree."""
        start, figures, wrong = time.perf_counter(), Figures(), ""
        known = held() or [{}] * len(servers)

        @cache  # most servers sample the same tokens
        def learners(tokens: tuple[int, ...], temperature: float) -> Sequence[float]:
            return self._use(lambda: learner.logprobs([*ids, *tokens], temperature=temperature))

        def right(server: Endpoint, tokens: tuple[int, ...]) -> Sequence[float]:
            """Return the learner's log-probabilities of tokens after the probe, else the server's without its cache."""
            found = learners(tokens, _temperature(server)) or ask(server, [*ids, *tokens]).logprobs
            return found[len(ids) - 1 :]

        try:
            asked = _at_once(partial(self._answers, ids), servers)
            logprobs = self._use(lambda: learner.logprobs(ids))
            expected = Expected(
                version=version,
                ids=ids,
                logprobs=logprobs,
                digests=self._use(lambda: learner.digests(dtype)),
                dtype=dtype,
                bound=self._bound(learner, dtype, ids, logprobs),
            )
            for server, answers, digests in zip(servers, asked, known, strict=True):
                own = digests or (answers[0].digests if answers else {})
                at, those = _temperature(server), partial(right, server)
                lines, gap = compare(expected, self._expected, answers, own, temperature=at, right=those)
                if gap is not None and gap > expected.bound:  # the weights have changed since the bound was measured
                    self._spread = (), 0.0
                    expected = attrs.evolve(expected, bound=self._bound(learner, dtype, ids, logprobs))
                    lines, gap = compare(expected, self._expected, answers, own, temperature=at, right=those)
                figures.add(Figures(difference=gap, bound=expected.bound, tensors=len(own)))
                if lines:
                    what = f"step {version}: the weights of version {version} did not arrive at {server.base_url}:"
                    wrong = "\n  ".join([what, *lines, CURE])
                    break
        except (CannotAnswer, CannotScore) as error:
            raise RunStopped(f"step {version}: the model server {error}", cause="server-failed") from error
        figures.background_s = time.perf_counter() - start
        return figures, expected, wrong

    def _answers(self, ids: Sequence[int], server: Endpoint) -> list[Answer]:
        """Return an address's answers; none if it cannot score: then only the weaker proof is left."""
        if self._weaker:
            return []
        temperature = _temperature(server)
        try:
            first = ask(server, ids, n=SAMPLED, temperature=temperature)
            return [first, *(ask(server, ids, score=False, n=1, temperature=temperature) for _ in range(ASKED - 1))]
        except CannotScore as error:
            self._weaker = True
            self.note(
                f"the server {server.base_url} cannot score given tokens ({error}); the weaker proof is used: the "
                "log-probabilities of sampled calls must be the learner's"
            )
            return []

    def _bound(self, learner: Learner, dtype: str, ids: Sequence[int], logprobs: Sequence[float]) -> float:
        """Return the largest difference of a log-probability that is no fault; measured once for each probe."""
        if list(self._spread[0]) != list(ids):
            spread, note = self._use(lambda: measured(learner, ids, dtype))
            self._spread = ids, spread
            if note:
                self.note(note)
        return rounding(logprobs, learner.layers) + 2 * self._spread[1]

    def _use(self, call: Callable[[], T]) -> T:
        """Let the learner compute, unless the run has ended."""
        with self._using:
            if self._ended:
                raise RunStopped("the run has ended")
            return call()

    # --- sampled calls, figures -------------------------------------------------------------------

    def sampled(self, *, step: int, difference: float, dtype: str) -> None:
        """Make sure that the log-probabilities recorded with a step's calls are the learner's, before its update.

        Their bound is four times the probe's, as the tokens differ. Without a proof of delivery
        (`run.delivery = false`) it is the difference that the dtype explains.

        Args:
            difference: The mean absolute difference over the tokens of the step's calls.

        Raises:
            RunStopped: They differ: the server sampled from another policy, or the tokens are not those of the call.
        """
        bound = CALLS[dtype] if self._expected is None else max(1e-3, 4 * self._expected.bound)
        self.step.add(Figures(calls_difference=difference, calls_bound=bound))
        if difference <= bound < math.inf:
            self.step.arrived += self._unproven
            self._unproven = False
            return
        raise RunStopped(
            f"step {step}: what is trained is not what was sampled. The log-probabilities recorded with its calls "
            f"differ from the learner's by {difference:.2g} on average over their tokens (bound {bound:.1g}).\n  The "
            f"learner has the weights of version {step - 1}, with which the rollouts were made. Either the server "
            "sampled with other weights, another prefix or another temperature, or the adapter changed the "
            "tokens of a call.\n  " + CURE,
            cause="sampled-differently",
        )

    def note(self, text: str) -> None:
        """Log a warning once, and keep it for the report."""
        if text not in self._notes:
            log.warning("%s", text)
            self._notes.append(text)

    def line(self) -> dict[str, Any]:
        """Return the entry of `metrics.jsonl` for the step that ends; empty if nothing was proven in it."""
        step, self.step = self.step, Figures()
        if not step.proofs:
            return {}
        self._run.add(step)
        return {**attrs.asdict(step), **({"notes": list(self._notes)} if self._notes else {})}

    def summary(self) -> dict[str, Any]:
        """Return the entry of `summary.json`. A transfer without a verdict counts as one that did not arrive."""
        whole = attrs.evolve(self._run)
        whole.add(self.step)
        whole.proofs += self._pending is not None
        return {"on": self.on, **attrs.asdict(whole), "notes": list(self._notes)}


def _temperature(server: Endpoint) -> float:
    return float(server.sampling.get("temperature", 1.0))


def _at_once(ask_one: Callable[[Endpoint], T], servers: Sequence[Endpoint]) -> list[T]:
    """Return the answers of servers that are asked at the same time; the error of one is raised."""
    asked = [in_background(partial(ask_one, server), "delivery") for server in servers]
    return [each.result() for each in asked]


def _kept(file: Path) -> list[int]:
    """Return the probe of a run directory; empty without one."""
    try:
        ids: list[int] = json.loads(read_text(file))["ids"]
        if len(ids) < 2 or not all(isinstance(token, int) and token >= 0 for token in ids):
            raise ValueError("ids must be two token ids or more")
        return ids
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else getattr(error, "strerror", None) or str(error)
        raise RunFileError(f"{file} cannot be read: {why}. Delete it: the run then chooses another probe") from None
