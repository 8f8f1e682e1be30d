"""GRPO from start to end: rollouts, group-relative advantages, update, weight sync to the server.

Defaults that differ from textbook GRPO (arXiv:2402.03300): advantages are not divided by the group's
standard deviation (Dr. GRPO), the loss is the mean over all tokens and the upper clip is wider (DAPO),
there is no KL loss, and a step makes one update, so the ratio is 1 up to rounding.

With `max_staleness = 1` the next step's rollouts run while a step is learned. They are one version behind, and the
loss corrects for that (`agentrig_grpo.loss`):

    rollouts k+1 (weights k-1)  ┐
    update k  (makes weights k) ┘  wait for both, the server takes weights k, validate, end the step, save
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch  # noqa: TID253  (imported when the algorithm is built)

from agentrig import Endpoint
from agentrig.algorithms import RolloutsAhead, Session
from agentrig.credit import group_advantages
from agentrig.errors import AgentrigError, CheckpointDamaged, ConfigError, RunStopped
from agentrig.hardware import Hardware
from agentrig.ledger import LEFT_OUT_BY_SAMPLES, Call, Entry
from agentrig.processes.servers import ServerError
from agentrig.rollouts import Rollout
from agentrig.run.checkpoints import reading, verify
from agentrig.servers import MakeServer, Server, ServerPlan
from agentrig_grpo import checkpoint, trainer_files
from agentrig_grpo.config import EmbeddedConfig, GrpoConfig
from agentrig_grpo.context import check_context
from agentrig_grpo.delivery import LearnerView
from agentrig_grpo.digests import tensor_digests
from agentrig_grpo.fitting import check_left, fitted
from agentrig_grpo.learner import Learner, TrainSample
from agentrig_grpo.model_files import ModelError, weight_files
from agentrig_grpo.naming import model_directory
from agentrig_grpo.passes import too_small
from agentrig_grpo.prompts import probe_of, prompts_of
from agentrig_grpo.sampler import tasks_of_step
from agentrig_grpo.server.embedded import Embedded
from agentrig_grpo.trainer_files import Best
from agentrig_grpo.used import entries_of

log = logging.getLogger(__name__)

DYING_S = 3.0
"""How long to look for the death of a server whose connections failed."""

OVERLAP = (
    "the next step's rollouts run during an update (max_staleness = 1): the loss is that of decoupled PPO, with "
    "importance weights truncated at {threshold:g}"
)
"""What a run with stale rollouts notes."""

MODEL_NAME = "policy"
"""The model's name in requests."""


class Grpo:
    """Implements `agentrig.algorithms.Algorithm`."""

    def __init__(self, config: GrpoConfig) -> None:
        self.config = config

    def run(self, session: Session) -> None:
        """Train until `steps` are done, the tasks are solved or the user asked to end."""
        config = self.config
        if config.final == "best" and not config.validate_every:
            raise ConfigError('[algorithm] final = "best" needs validation, and validate_every = 0 turns it off')
        source = model_directory(config.model)
        dtype = check_device(session.hardware, config.dtype)
        check_context(session.checkpoint or source, max_length=config.max_length, max_tokens=config.max_tokens)
        plan = self._plan(session.checkpoint or source, session.hardware, dtype)
        plan = attrs.evolve(plan, seed=session.seed, log=session.directory / "server.log")
        with session.server(plan) as server, _dead_server_first(server, session):
            learner, tokenizer, best = self._load(session, source, dtype)  # a server may start meanwhile
            endpoints = self._endpoints(server)
            view = LearnerView(learner, server.dtype)
            measured = self._measured(endpoints)
            if not learner.share:
                session.note(learner.path)
            if config.max_staleness:
                session.note(OVERLAP.format(threshold=config.rollout_is_threshold))
            if learner.share and (small := too_small(prompts_of(session.train_tasks, tokenizer), config)):
                log.warning("%s", small)
                session.note(small)
            self._deliver(session, server, learner, view, tokenizer, session.first_step - 1)
            check_left(self._fit, session.hardware.torch_device)
            session.plan_steps(config.steps)  # a resumed run rewrites its directory from here on
            if session.checkpoint is None:
                session.report(measured, when="before", step=0)
                if config.validate_every:
                    self._validate(session, measured, best, 0, learner)
            step, ahead = session.first_step - 1, None
            for step in range(session.first_step, config.steps + 1):
                if session.stopping or session.solved:
                    step -= 1
                    break
                behind = 0 if ahead is None else config.max_staleness
                rollouts = self._rollouts(session, endpoints, step) if ahead is None else ahead.rollouts()
                ahead = self._begin(session, endpoints, step + 1)
                session.delivery.settle()
                if config.server_sleep:
                    session.delivery.prepare(endpoints)
                clock = time.perf_counter()
                samples = self.samples(rollouts)
                if config.server_sleep:
                    server.sleep()
                metrics = learner.update(samples, step=step, staleness=behind, sketch=session.sketch(step))
                digests = {"dtype": dtype, "weights": tensor_digests(learner.trained)}
                if config.server_sleep:
                    server.wake()
                if learner.furthest is not None:
                    gap, at = learner.furthest
                    call, version = _call_of(at, rollouts), step - 1 - behind
                    session.delivery.sampled(step=step, difference=gap, call=call, dtype=dtype, version=version)
                update_s = time.perf_counter() - clock
                if ahead is not None:
                    ahead.wait()  # a server takes weights only while no request is running
                updated = time.perf_counter()
                proof = self._deliver(session, server, learner, view, tokenizer, step)
                pushed = time.perf_counter() - proof
                due = config.final == "best" and (step == config.steps or session.solved)
                if config.validate_every and (due or step % config.validate_every == 0):
                    self._validate(session, measured, best, step, learner)
                validated = time.perf_counter()
                session.end_step(
                    step,
                    metrics=metrics,
                    time_s={
                        "update": update_s,
                        "push": pushed - updated,
                        "validation": validated - pushed - proof,
                    },
                    digests=digests,
                    calls=self.entries(rollouts, samples, learner),
                )
                last = step == config.steps or session.stopping or session.solved
                if last or step % config.save_every == 0:
                    keep = bool(config.keep_every) and step % config.keep_every == 0
                    self._save(session, step, learner, tokenizer, best, dtype, keep=keep or last)
            session.delivery.settle()
            if session.stopping:
                return
            if config.final == "best" and not best.trained:
                log.warning("there was nothing to validate on: the run ends with the last weights instead of the best")
            if config.final == "best" and best.trained and best.step != step:
                kept = f"step {best.step}" if best.step else "the start: no step did better"
                figures = best.accuracy, best.reward
                log.warning("ending with the weights of %s, validation accuracy %.3f, mean reward %.4g", kept, *figures)
                learner.load_weights(best.trained)
                self._deliver(session, server, learner, view, tokenizer, best.step)
                self._save(session, step, learner, tokenizer, best, dtype, keep=True)
            session.report(measured, when="after", step=step)
            session.delivery.settle()

    @contextmanager
    def serve(
        self, *, hardware: Hardware, checkpoint: Path | None, server: MakeServer | None = None
    ) -> Iterator[Endpoint | Sequence[Endpoint]]:
        """Serve a checkpoint, or the starting model, at the validation temperature.

        Args:
            hardware: What to serve on.
            checkpoint: A Hugging Face directory; None for the starting model.
            server: Makes the server; None for `embedded` with its defaults.
        """
        source = checkpoint or model_directory(self.config.model)
        dtype = check_device(hardware, self.config.dtype)
        check_context(source, max_length=self.config.max_length, max_tokens=self.config.max_tokens)
        make = server or partial(Embedded, EmbeddedConfig())
        with make(self._plan(source, hardware, dtype)) as started:
            measured = self._measured(self._endpoints(started))
            yield measured if len(measured) > 1 else measured[0]

    def samples(self, rollouts: Sequence[Rollout]) -> list[TrainSample]:
        """Return the trained calls of a step: each has its rollout's advantage."""
        advantages = group_advantages(
            [r.group for r in rollouts],
            [r.value for r in rollouts],
            scale=self.config.scale_rewards,
            negative_scale=self.config.negative_scale,
        )
        return [
            TrainSample(
                prompt_ids=t.prompt_ids,
                response_ids=t.response_ids,
                logprobs=t.logprobs,
                advantage=advantage,
                rollout=i,
                group=rollout.group,
                call=Call(rollout.id, t.span_id),
            )
            for i, (rollout, advantage) in enumerate(zip(rollouts, advantages, strict=True))
            if advantage is not None
            for t in rollout.triplets
        ]

    def entries(
        self, rollouts: Sequence[Rollout], samples: Sequence[TrainSample], learner: Learner
    ) -> list[Entry] | None:
        """Return what the update did with each call; None if a subclass's samples don't say which calls they are."""
        if any(s.call is None for s in samples):
            return None
        found = entries_of(
            samples,
            learner.used,
            values=[r.value for r in rollouts],
            groups=[r.group for r in rollouts],
            negative_scale=self.config.negative_scale,
        )
        if type(self).samples is not Grpo.samples:  # what a subclass chooses to leave out is not lost
            chosen = {s.call for s in samples}
            found += [
                Entry(call, "dropped", len(t.response_ids), LEFT_OUT_BY_SAMPLES)
                for r in rollouts
                for t in r.triplets
                if (call := Call(r.id, t.span_id)) not in chosen
            ]
        return found

    def _rollouts(self, session: Session, endpoints: Sequence[Endpoint], step: int) -> list[Rollout]:
        """Run a step's rollouts with the weights that it begins with."""
        tasks = tasks_of_step(session.train_tasks, n=self.config.tasks_per_step, step=step, seed=session.seed)
        return session.rollouts(tasks, n=self.config.group_size, endpoint=endpoints, step=step, version=step - 1)

    def _begin(self, session: Session, endpoints: Sequence[Endpoint], step: int) -> RolloutsAhead | None:
        """Begin a step's rollouts while the step before is learned; None if it has to wait, or won't come."""
        config = self.config
        if not config.max_staleness or step > config.steps or session.stopping or session.solved:
            return None
        return session.begin_rollouts(
            tasks_of_step(session.train_tasks, n=config.tasks_per_step, step=step, seed=session.seed),
            n=config.group_size,
            endpoint=endpoints,
            step=step,
            version=step - 2,
            max_staleness=config.max_staleness,
        )

    def _deliver(
        self, session: Session, server: Server, learner: Learner, view: LearnerView, tokenizer: Any, version: int
    ) -> float:
        """Give the server the learner's weights, and begin to prove that it answers with them.

        Returns:
            How long the proof held the run up, seconds.
        """
        endpoints = self._endpoints(server)
        start = time.perf_counter()
        if not self.config.server_sleep:
            session.delivery.prepare(endpoints)
        prepared = time.perf_counter()
        server.take(checkpoint.weights(learner.model).items(), version)
        swapped = time.perf_counter()
        session.delivery.begin(
            version=version,
            learner=view,
            servers=endpoints,
            context=server.context,
            prompt=lambda: probe_of(session.train_tasks[0], tokenizer),
            held=server.held,
        )
        return prepared - start + time.perf_counter() - swapped

    def _plan(self, source: Path, hardware: Hardware, dtype: str) -> ServerPlan:
        config = self.config
        return ServerPlan(
            model=source,
            name=MODEL_NAME,
            hardware=hardware,
            dtype=dtype,
            context=config.max_length,
            sleeps=config.server_sleep,
        )

    def _endpoints(self, server: Server) -> list[Endpoint]:
        """Return the addresses with the sampling of training."""
        return [endpoint.with_sampling(**self._sampling()) for endpoint in server.endpoints]

    def _sampling(self) -> dict[str, Any]:
        config = self.config
        return {"temperature": config.temperature, "top_p": config.top_p, "max_tokens": config.max_tokens}

    def _measured(self, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
        """Return the addresses with the sampling of validation."""
        return [e.with_sampling(temperature=self.config.val_temperature, top_p=1.0) for e in endpoints]

    def _validate(
        self, session: Session, endpoint: Sequence[Endpoint], best: Best, step: int, learner: Learner
    ) -> None:
        """Validate, and keep the weights if they are the best: by accuracy, then by mean reward."""
        accuracy = session.validate(endpoint, step=step)
        reward = session.measured.reward if session.measured is not None else None
        if accuracy is None or reward is None or (accuracy, reward) <= (best.accuracy, best.reward):
            return
        best.accuracy, best.reward, best.step = accuracy, reward, step
        if self.config.final == "best":
            best.trained = {name: p.detach().cpu().clone() for name, p in learner.trained.items()}

    def _save(
        self, session: Session, step: int, learner: Learner, tokenizer: Any, best: Best, dtype: str, *, keep: bool
    ) -> None:
        def write(directory: Path) -> None:
            session.delivery.settle()  # until then the proof uses the model
            checkpoint.save(learner.model, tokenizer, directory, dtype=getattr(torch, dtype))
            trainer_files.write(directory, learner=learner.state(), best=best, step=step, seed=session.seed)
            session.delivery.sign(directory)

        session.save_checkpoint(step, write, keep=keep)

    def _load(self, session: Session, source: Path, dtype: str) -> tuple[Learner, Any, Best]:
        """Return the learner and its tokenizer, as the run's checkpoint or the start has them, and the best weights."""
        config = self.config
        verify(source)  # it may be another run's checkpoint
        check_context(source, max_length=config.max_length, max_tokens=config.max_tokens)
        tokenizer = checkpoint.load_tokenizer(source)
        attention = checkpoint.attention_of(session.hardware)
        device = session.hardware.torch_device
        self._fit = fitted(source, config, dtype=dtype, device=device, attention=attention)
        model = checkpoint.load_model(source, device=device, attention=attention)
        checkpoint.check_vocabulary(model, tokenizer)
        fit = self._fit
        more: dict[str, Any] = {"chunk": fit.chunk, "recomputed": fit.recomputed}
        learner = Learner(model, fit.config, dtype=dtype, seed=session.seed, **more)
        if session.checkpoint is None:
            return learner, tokenizer, Best()
        with reading(session.checkpoint):
            return learner, tokenizer, self._resume(learner, session.checkpoint, session)

    def _resume(self, learner: Learner, directory: Path, session: Session) -> Best:
        state, best = trainer_files.read(directory)
        try:
            weight_files(directory)
            learner.load_state(state)
        except ModelError as error:
            raise CheckpointDamaged(directory, str(error)) from None
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            reason = f"trainer/learner.pt does not fit ({type(error).__name__}: {error})"
            raise CheckpointDamaged(directory, reason) from error
        of = session.first_step - 1
        if best.trained and all(torch.equal(best.trained[name], t) for name, t in state["trained"].items()):
            of = best.step  # the run had ended with its best weights
        lines = {line["step"]: line for line in session.lines}
        recorded = lines.get(of, {}).get("digests", {}).get("weights")
        if recorded and recorded != tensor_digests(learner.trained):
            raise CheckpointDamaged(
                directory, f"its weights are not those of the run after step {of} (digests.weights, metrics.jsonl)"
            )
        if self.config.final == "best" and best.accuracy >= 0 and not best.trained:
            log.warning("the best weights of the earlier steps were not saved (final was last): only later steps count")
            return Best()
        return best


def _call_of(sample: TrainSample, rollouts: Sequence[Rollout]) -> str:
    """Name the call that a sample was made of, for a message."""
    rollout = rollouts[sample.rollout]
    nodes = [t.node for t in rollout.triplets if t.prompt_ids is sample.prompt_ids]
    return f"a call of {nodes[0] if nodes and nodes[0] else 'no node'} in rollout {rollout.id}"


@contextmanager
def _dead_server_first(server: Server, session: Session) -> Iterator[None]:
    """Raise the server's error when a run stops because its server died, and say how to go on."""
    try:
        yield
    except (RunStopped, ServerError) as stopped:
        # a process that is killed closes its connections some time before its parent can see that it is dead
        end = time.monotonic() + (DYING_S if stopped.__cause__ is not None else 0.0)
        while True:
            try:
                server.check()
            except ServerError as dead:
                if not session.lines:
                    raise
                again = f"agentrig train --resume {session.directory}"
                raise ServerError(f"{dead}\n  The unfinished step is lost; resume with: {again}") from stopped
            if time.monotonic() > end:
                break
            time.sleep(0.05)
        raise


def check_device(hardware: Hardware, dtype: str) -> str:
    """Check that torch can use the hardware; returns the dtype to compute in.

    Raises:
        AgentrigError: torch cannot use it. There is no fallback to the CPU.
        ConfigError: The hardware doesn't train in that dtype.
    """
    kind = hardware.torch_device.split(":")[0]
    if kind == "cpu":
        threads = getattr(hardware, "threads", None)
        if threads:
            torch.set_num_threads(threads)
    elif not _usable(kind):
        raise AgentrigError(
            f"the run's hardware is {hardware.name}, but torch {torch.__version__} cannot use the device {kind!r}: "
            f"{hardware.torch_cure}. Or use the CPU: --hardware cpu"
        )
    if dtype == "auto":
        return "bfloat16" if kind != "cpu" and "bfloat16" in hardware.dtypes else "float32"
    if kind != "cpu" and dtype not in hardware.dtypes:
        raise ConfigError(f"[algorithm] dtype = {dtype!r}: {hardware.name} trains in {', '.join(hardware.dtypes)}")
    return dtype


def _usable(kind: str) -> bool:
    try:
        return bool(torch.get_device_module(kind).is_available())
    except RuntimeError:
        return False
