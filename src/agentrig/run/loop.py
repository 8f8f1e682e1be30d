"""The training loop, step by step from tasks to new weights.

    tasks → rollouts → credit → samples → update → weights to the server → validation → end of step → checkpoint

With `max_staleness = 1` the next step's rollouts run while a step is learned. They are one version behind, and the
learner's loss corrects for that:

    rollouts k+1 (weights k-1)  ┐
    update k  (makes weights k) ┘  wait for both, the server takes weights k, validate, end the step, save

A checkpoint is copied at the end of its step, and written while the next one runs (`agentrig.run.saving`).

The run's credit says what each call of a step is worth. The algorithm says how the model is served, and brings the
learner. With `algorithm.demonstrations`, a step's rollouts are demonstrations (`agentrig.run.demonstrated`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import cast

import attrs

from agentrig.algorithms import Algorithm, LoopAlgorithm, Measurement
from agentrig.background import in_background
from agentrig.credit import Credit, imitate, worths_of_calls
from agentrig.endpoints import Endpoint
from agentrig.errors import CheckpointDamaged, ConfigError, RunStopped, memory_named
from agentrig.hardware import Hardware
from agentrig.learners import Copying, Learner, TrainSample
from agentrig.ledger import LEFT_OUT_BY_CREDIT, NOT_ADMITTED, ZERO_ADVANTAGE, Call, Entry
from agentrig.rollouts import Rollout
from agentrig.run.checkpoints import Best, loading, read_state, write_state
from agentrig.run.demonstrated import Demonstrated
from agentrig.run.drawing import RULES, groups_of
from agentrig.run.guards import dead_server_first
from agentrig.run.saving import Saving, check_room, writes_of
from agentrig.run.session import END_S, RolloutsAhead, RunSession
from agentrig.servers import MakeServer, Server

log = logging.getLogger(__name__)

GIVE_SERVER_LESS = (
    "Give the model's server less of the device in [server], or let it sleep during updates: "
    "algorithm.server_sleep = true"
)
"""What helps where the learner needs a little more beside its server."""

SMALLER = (
    "End the other processes on the device, or train adapters only (algorithm.lora_rank = 16); a smaller model helps "
    "too"
)
"""What helps where a model does not fit at all."""


AUDITED = 4_000_000_000
"""Bytes: an audit waits until a checkpoint of at most this size is written; of a larger one it says what it lacks."""


class Loop:
    """Runs an algorithm that brings a learner, once; as `agentrig.algorithms.Algorithm` does it itself."""

    session: RunSession
    server: Server
    learner: Learner
    sleeps = False

    def __init__(self, algorithm: LoopAlgorithm) -> None:
        self.algorithm, self.settings, self.best = algorithm, algorithm.config, Best()
        self.saving = Saving(self.settings.save_every)
        self._shown = str(getattr(self.settings, "demonstrations", ""))

    def run(self, session: RunSession) -> None:
        """Train until `steps` are done, the tasks are solved or the user asked to end."""
        settings, self.session = self.settings, session
        self.drawing = RULES[settings.task_sampling](session.train_tasks, settings, session.seed)
        self.drawing.resume(session.directory, session.first_step)
        if settings.final == "best" and not settings.validate_every:
            raise ConfigError('[algorithm] final = "best" needs validation, and validate_every = 0 turns it off')
        serving = self.algorithm.serving(session.hardware, None)  # a resumed run delivers its checkpoint's weights
        sleeps = settings.server_sleep is True
        serving = attrs.evolve(serving, seed=session.seed, log=session.directory / "server.log", sleeps=sleeps)
        if fit := getattr(self.algorithm, "fit", None):
            serving = fit(serving, session)
        self.sleeps = serving.sleeps
        shown = Demonstrated(session, self._shown) if self._shown else None

        def advice() -> str:
            return session.advice() if session.lines else ""

        # The checkpoint that is being written is complete before an error says what was not saved.
        with session.server(serving) as self.server, dead_server_first(self.server, advice), self.saving:
            if borrow := getattr(self.algorithm, "borrow", None):
                borrow(self.server)
            if session.resumed:
                self.learner = learner = self._load()  # a server may start meanwhile
                if session.checkpoint is not None:
                    with loading(session.checkpoint):
                        self._resume(session.checkpoint)
            else:
                session.plan_steps(settings.steps)
                session.check_teacher(self.server.endpoints)
                loaded = self._measure_and_load()
                if loaded is None:
                    return
                self.learner = learner = loaded
                self._prove(0, loaded=True)  # what the server loaded itself, and has answered with
            if self.sleeps:  # later, it is done before the server sleeps
                session.delivery.prepare(self._sampling())
            self._deliver(session.first_step - 1)
            if shown is not None:
                shown.begin(learner, session.plan.components["algorithm"].spec.name)
            self._plan_saving()
            if session.resumed:
                session.check_teacher(self.server.endpoints)
                session.plan_steps(settings.steps)  # it rewrites its directory from here on
            if session.checkpoint is None:
                session.record_start(learner.fingerprint())
                if session.resumed:  # of a new run, it is made already
                    session.report(self._greedy(), when="before", step=0)
            if session.checkpoint is None and settings.validate_every and not session.stopping:
                self._validate(0)

            session.start_clock()  # the learner's load and the first transfer are no part of a step
            step, ahead, enough = session.first_step - 1, None, False
            while step < settings.steps and not (session.stopping or session.solved or enough):
                step += 1
                self.saving.check()
                fresh = ahead is None
                if ahead is not None:
                    rollouts = ahead.rollouts()
                elif shown is not None:
                    rollouts = shown.rollouts(step, settings.tasks_per_step)
                else:
                    sample = partial(
                        session.rollouts, n=settings.group_size, endpoint=self._sampling(), step=step, version=step - 1
                    )
                    rollouts = session.gate.sample(step, self.drawing, sample)
                self.drawing.see(groups_of(rollouts))
                ahead = self._begin_rollouts(step + 1)
                session.delivery.settle()
                if self.sleeps:
                    session.delivery.prepare(self._sampling())

                start = time.perf_counter()
                samples, left_out = self._samples(rollouts)
                if self.sleeps:
                    self.server.sleep()
                metrics = learner.update(samples, step=step, sketch=session.sketch(step))
                digests: dict[str, object] = {"dtype": serving.dtype, "weights": learner.fingerprint()}
                if serving.adapters:
                    digests["merged"] = False
                if self.sleeps:
                    with memory_named(f"step {step}: the server's waking after the update", GIVE_SERVER_LESS):
                        self.server.wake()
                gap = metrics.get("sampled_difference")
                if gap is not None and fresh:  # since stale calls the policy has moved
                    session.delivery.sampled(step=step, difference=gap, dtype=serving.dtype)
                update_s = time.perf_counter() - start
                if ahead is not None:
                    ahead.wait()  # a server takes weights only while no request is running

                updated = time.perf_counter()
                proof_s = self._deliver(step)
                delivered = time.perf_counter()
                last = step == settings.steps or session.solved
                if settings.validate_every and (
                    step % settings.validate_every == 0 or (last and settings.final == "best")
                ):
                    self._validate(step)
                if session.enough is not None and not last:
                    enough = session.enough(step, partial(self._measured, step))
                validated = time.perf_counter()

                if session.auditing.due and self.saving.size <= AUDITED:
                    self.saving.settle()  # the auditor reads the checkpoint of the step before
                session.end_step(
                    step,
                    metrics={**metrics, **self.drawing.figures(step), **session.gate.figures},
                    time_s={
                        **self.saving.waited(),
                        "update": update_s,
                        "push": delivered - updated - proof_s,
                        "validation": validated - delivered,
                    },
                    digests=digests,
                    calls=[*self._entries(samples), *left_out],
                )
                last = step == settings.steps or session.stopping or session.solved or enough
                if self.saving.due(step) or last:
                    self._save(step, weights_of=step)

            self.saving.settle()  # what is measured from here on replaces the end of a run that is extended
            session.delivery.settle()
            if session.stopping:
                return
            if settings.final == "best":
                self._take_best(step)
            session.report(self._greedy(), when="after", step=step)
            session.delivery.settle()

    @contextmanager
    def serve(
        self, *, hardware: Hardware, checkpoint: Path | None, server: MakeServer
    ) -> Iterator[Endpoint | Sequence[Endpoint]]:
        """Serve a checkpoint, or the starting model, at the validation temperature."""
        with server(self.algorithm.serving(hardware, checkpoint)) as self.server, dead_server_first(self.server):
            measured = self._greedy()
            yield measured if len(measured) > 1 else measured[0]

    def _load(self) -> Learner:
        with memory_named("the learner's model could not be loaded", SMALLER):
            return self.algorithm.learner(self.session)

    def _measure_and_load(self) -> Learner | None:
        """Measure the held-out accuracy before training; return the learner, which loads meanwhile.

        None if the user has asked to end: a resume takes the measurement if it knows which weights it is of.
        """
        session, served = self.session, self._greedy()

        def load() -> Learner:
            try:
                return self._load()
            except Exception as error:
                session.runtime.end_results(error)  # nobody needs the measurement any more
                raise

        loading = in_background(load, "learner")
        try:
            if session.report(served, when="before", step=0) is not None and not session.stopping:
                log.info("next: the learner loads its model, and the server must answer with the learner's weights")
        except BaseException:
            with suppress(TimeoutError):  # the process must not end while it computes
                loading.exception(END_S)
            if not (loading.done() and loading.exception()):
                raise
        if not session.stopping:
            learner = loading.result()
        if session.stopping:
            with suppress(TimeoutError):
                session.record_start(loading.result(END_S).fingerprint())
            return None
        return learner

    # --- rollouts and samples ---------------------------------------------------------------------

    def _begin_rollouts(self, step: int) -> RolloutsAhead | None:
        """Begin a step's rollouts while the step before is learned; None if it has to wait, or won't come."""
        settings, session = self.settings, self.session
        if not settings.max_staleness or step > settings.steps or session.stopping or session.solved:
            return None
        return session.begin_rollouts(
            self.drawing.draw(step),
            n=settings.group_size,
            endpoint=self._sampling(),
            step=step,
            version=step - 2,
            max_staleness=settings.max_staleness,
        )

    def _samples(self, rollouts: Sequence[Rollout]) -> tuple[list[TrainSample], list[Entry]]:
        refused = self.session.gate.refused(rollouts)
        return samples_of(imitate if self._shown else self.session.credit, rollouts, refused)

    def _entries(self, samples: Sequence[TrainSample]) -> Iterator[Entry]:
        """Yield the ledger's entries: what the learner says that it did with the samples."""
        for sample, (tokens, reason) in zip(samples, self.learner.used, strict=True):
            call = sample.call or Call("(no call)", "")
            if tokens:
                yield Entry(call, "trained", tokens, advantage=sample.advantage)
                if tokens < len(sample.response_ids) and 0 in sample.advantages:  # tokens that are worth nothing
                    yield Entry(call, "dropped", sample.advantages.count(0), ZERO_ADVANTAGE, sample.advantage)
            elif reason:
                yield Entry(call, "dropped", len(sample.response_ids), reason, sample.advantage)

    # --- the server -------------------------------------------------------------------------------

    def _sampling(self) -> list[Endpoint]:
        """Return the server's addresses with the sampling of training."""
        settings = self.settings
        fields = {"temperature": settings.temperature, "top_p": settings.top_p, "max_tokens": settings.max_tokens}
        return [endpoint.with_sampling(**fields) for endpoint in self.server.endpoints]

    def _greedy(self) -> list[Endpoint]:
        """Return the server's addresses with the sampling of validation."""
        return [e.with_sampling(temperature=self.settings.val_temperature, top_p=1.0) for e in self._sampling()]

    def _deliver(self, version: int) -> float:
        """Give the server the learner's weights, and begin to prove that it answers with them.

        Returns:
            How long the proof held the run up, seconds.
        """
        start = time.perf_counter()
        if not self.sleeps:
            self.session.delivery.prepare(self._sampling())
        prepared = time.perf_counter()
        with memory_named(f"step {version}: the way of the new weights to the server", GIVE_SERVER_LESS):
            self.server.take(self.learner.weights(), version)
        self.learner.ready()
        taken = time.perf_counter()
        self._prove(version)
        return prepared - start + time.perf_counter() - taken

    def _prove(self, version: int, *, loaded: bool = False) -> None:
        """Begin to prove that the server answers with the learner's weights."""
        self.session.delivery.begin(
            version=version,
            learner=self.learner,
            dtype=self.server.dtype,
            servers=self._sampling(),
            context=self.server.context,
            prompt=lambda: self.learner.prompt(self.session.train_tasks[0].input_text()),
            held=self.server.held,
            loaded=loaded,
        )

    # --- validation and checkpoints ---------------------------------------------------------------

    def _validate(self, step: int) -> None:
        """Validate, and keep the weights if they are the best."""
        session, best = self.session, self.best
        accuracy = session.validate(self._greedy(), step=step)
        reward = session.measured.reward if session.measured is not None else None
        if accuracy is None or reward is None:
            return
        if best.accuracy is None or best.reward is None or (accuracy, reward) > (best.accuracy, best.reward):
            self.best = Best(step, accuracy, reward, kept=self.settings.final == "best")
            if self.best.kept:
                self.learner.keep()

    def _measured(self, step: int) -> Measurement | None:
        """Validate, whether the step is one of `validate_every` or not."""
        self._validate(step)
        return self.session.measured

    def _take_best(self, step: int) -> None:
        """End a run with the weights that did best in validation."""
        best = self.best
        if not best.kept:
            log.warning("there was nothing to validate on: the run ends with the last weights instead of the best")
        elif best.step != step:
            kept = f"step {best.step}" if best.step else "the start: no step did better"
            figures = best.accuracy, best.reward
            log.warning("ending with the weights of %s, validation accuracy %.3f, mean reward %.4g", kept, *figures)
            self.learner.restore()
            recorded = self._recorded(best.step)
            if recorded and recorded != self.learner.fingerprint():
                raise RunStopped(
                    f"the weights of {kept}, which did best, cannot be restored: what the learner set has another "
                    "digest. Its `keep` has to copy the weights, not to refer to them"
                )
            self._deliver(best.step)
            self._save(step, weights_of=best.step)
            self.saving.settle()

    def _plan_saving(self) -> None:
        """Get ready to save, and check that the disk has room; see `check_room` for the error."""
        session, settings, learner = self.session, self.settings, self.learner
        if not isinstance(learner, Copying):
            return
        self.saving.size = learner.plan_saving()
        writes, kept = writes_of(settings, session.first_step)
        folder = session.directory / "checkpoints"
        check_room(folder, size=self.saving.size, writes=writes, kept=kept, resumed=session.resumed)

    def _save(self, step: int, *, weights_of: int) -> None:
        """Copy what a step's checkpoint holds, and begin to write it; a learner that can't be copied is waited for."""
        session, learner, every = self.session, self.learner, self.settings.keep_every
        keep = bool(every) and step % every == 0
        session.delivery.settle()  # until then the proof uses the model

        def copy() -> Callable[[], object]:
            sign, best = session.delivery.signature(), self.best
            write_learner = learner.copied() if isinstance(learner, Copying) else None

            def write(directory: Path) -> None:
                (write_learner or learner.save)(directory)
                sign(directory)
                write_state(directory, step=step, weights_of=weights_of, seed=session.seed, best=best)

            def save() -> object:
                return session.save_checkpoint(step, write, keep=keep)

            if write_learner is None:
                save()
                return lambda: None
            return save

        self.saving.save(copy)

    def _resume(self, checkpoint: Path) -> None:
        """Load the learner and the best weights so far."""
        weights_of, self.best = read_state(checkpoint)
        self.learner.load(checkpoint)
        recorded = self._recorded(weights_of)
        if recorded and recorded != self.learner.fingerprint():
            raise CheckpointDamaged(
                checkpoint,
                f"its weights are not those of the run after step {weights_of} (digests.weights, metrics.jsonl)",
            )
        if self.settings.final == "best" and self.best.accuracy is not None and not self.best.kept:
            log.warning("the best weights of the earlier steps were not saved (final was last): only later steps count")
            self.best = Best()

    def _recorded(self, step: int) -> str:
        """Return the digest of the weights after a step, 0 for the start; '' if none was recorded."""
        if not step:
            return self.session.start_weights
        line = next((line for line in self.session.lines if line["step"] == step), {})
        return str(line.get("digests", {}).get("weights", ""))


def samples_of(
    credit: Credit, rollouts: Sequence[Rollout], refused: Collection[str] = ()
) -> tuple[list[TrainSample], list[Entry]]:
    """Return a sample for each call that a credit gives a worth, and the ledger's entries of the others.

    Args:
        refused: The groups that are not admitted, see `agentrig.run.gate`: the credit does not see them.
    """
    samples, left_out = list[TrainSample](), list[Entry]()
    admitted = [rollout for rollout in rollouts if rollout.group not in refused]
    for rollout in rollouts if refused else ():
        dropped = rollout.triplets if rollout.group in refused else ()
        left_out += [Entry(Call(rollout.id, t.span_id), "dropped", len(t.response_ids), NOT_ADMITTED) for t in dropped]
    worths = worths_of_calls(credit, admitted)
    for place, (rollout, calls) in enumerate(zip(admitted, worths, strict=True)):
        for triplet, advantage in zip(rollout.triplets, calls, strict=True):
            call = Call(rollout.id, triplet.span_id)
            if advantage is None:
                left_out.append(Entry(call, "dropped", len(triplet.response_ids), LEFT_OUT_BY_CREDIT))
                continue
            sample = TrainSample(
                prompt_ids=triplet.prompt_ids,
                response_ids=triplet.response_ids,
                logprobs=triplet.logprobs,
                advantage=advantage,
                rollout=place,
                group=rollout.group,
                call=call,
            )
            samples.append(sample)
    return samples, left_out


def runnable(built: Algorithm | LoopAlgorithm) -> Algorithm:
    """Return an algorithm with `run` and `serve`: `built` itself if it has them, else a `Loop` with its parts."""
    return cast(Algorithm, built if hasattr(built, "run") else Loop(built))
