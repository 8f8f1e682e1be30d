"""Algorithms: from triplets to new weights. Most bring a learner; others bring a loop of their own."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Protocol

import attrs

from agentrig.audit.sketch import Sketch
from agentrig.credit import Credit
from agentrig.delivery import Delivery
from agentrig.endpoints import Endpoint
from agentrig.hardware import Hardware
from agentrig.learners import Learner, LoopSettings
from agentrig.ledger import Entry
from agentrig.rollouts import Mode, OnGroups, Rollout
from agentrig.servers import Server, ServerMemory, ServerPlan
from agentrig.tasks import Task


@attrs.frozen(kw_only=True)
class Measurement:
    """The result of a measurement, over the rollouts that have a reward.

    Attributes:
        accuracy: Share of correct rollouts, from 0 to 1; None if `n` is 0.
        reward: Mean reward; None if `n` is 0.
        n: Number of rollouts.
        classes: Of each class of each slice of the tasks (`Task.slices`): how many rollouts are right, and how many
            there are; empty where nobody asked.
    """

    accuracy: float | None
    reward: float | None
    n: int
    classes: Mapping[tuple[str, str], Sequence[int]] = attrs.field(factory=dict, repr=False)

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> Measurement:
        """Measure rollouts."""
        values = [r.value for r in rollouts if r.value is not None]
        right = sum(bool(r.correct) for r in rollouts)
        n = len(values)
        return cls(accuracy=right / n if n else None, reward=statistics.fmean(values) if n else None, n=n)


class Session(Protocol):
    """What a run passes to its algorithm.

    Attributes:
        train_tasks: The training split.
        validation_tasks: The validation split; empty if there is none.
        prompts: The agent's prompts in force, name to template. An algorithm that trains prompts sets them before it
            asks for rollouts, a validation or a report.
        directory: The run directory.
        resumes: The command that resumes the run, for messages.
        hardware: What the algorithm runs on.
        seed: The run's seed; derive every random stream from it.
        first_step: 1, or the step after the last checkpoint when the run is resumed.
        checkpoint: The checkpoint to start from when the run is resumed, else None.
        stopping: True once the user asked to end (Ctrl-C): finish the step, save, return.
        solved: True once every rollout of three steps in a row got the same reward and is correct: there is nothing
            left to learn. Finish the step, save, `report` "after", return; the run then counts as successful.
        delivery: Proves that the model's server answers with the weights that were trained: call its `prepare` before
            and `begin` after each transfer, its `settle` before the model is used, and its `sign` when a checkpoint is
            written.
        credit: What `[credit]` selects: `credit(groups)` says what each rollout of a step's groups is worth, or each of
            its calls. For an algorithm whose spec names a default `credit`.
        measured: The latest result of `validate` or `report`: accuracy and mean reward; None before the first.
    """

    train_tasks: Sequence[Task]
    validation_tasks: Sequence[Task]
    prompts: Mapping[str, str]
    directory: Path
    resumes: str
    hardware: Hardware
    seed: int
    first_step: int
    checkpoint: Path | None
    stopping: bool
    solved: bool
    delivery: Delivery
    credit: Credit
    measured: Measurement | None

    @property
    def lines(self) -> Sequence[Mapping[str, Any]]:
        """The lines of `metrics.jsonl` so far, including those from before a resume.

        An algorithm that counts over several steps rebuilds its counts from them, so that a resumed run behaves like
        an uninterrupted one.
        """

    def server(self, plan: ServerPlan) -> Server:
        """Return the model's server that `[server] use` names, not started: use it in a `with` statement.

        For an algorithm whose spec has `server=True`.

        Raises:
            agentrig.errors.PluginError: The server can't be built.
        """

    def check_teacher(self, servers: Sequence[Endpoint]) -> None:
        """Check the teacher of the run's credit, if it has one: call it before the first rollouts.

        Args:
            servers: Of the model that is trained, with its weights.

        Raises:
            agentrig.errors.ConfigError: See `agentrig.credit.Teacher.ready`.
        """

    @property
    def calls(self) -> int:
        """How many rollouts the runners run at once at most; 0 if that is not known, for runners of other machines."""

    @property
    def server_memory(self) -> ServerMemory | None:
        """What the settings of `[server]` say of the server's memory; None if the server does not say."""

    def record(self, name: str, value: Mapping[str, Any]) -> None:
        """Keep a fact about this run in `manifest.json`, under a name of its own; it replaces an earlier one."""

    def rollouts(
        self,
        tasks: Sequence[Task],
        *,
        n: int,
        endpoint: Endpoint | Sequence[Endpoint],
        step: int,
        mode: Mode = "train",
        on_groups: OnGroups | None = None,
        version: int | None = None,
    ) -> list[Rollout]:
        """Run the agent n times on each task; block until all have ended.

        Args:
            n: The group's size.
            endpoint: One server, or several replicas: groups go to them in turn, each group to one.
            on_groups: Called in this thread with groups that are complete while others still run, once for each
                group, before the checks of the step. Work done here overlaps with the rollouts.
            version: Version of the weights that the server has; for training, `step - 1`. A rollout with a call that
                states another version then fails with the kind `stale-weights` (older) or `unknown-weights` (newer).

        Returns:
            `len(tasks) * n` rollouts, the n of one task side by side, failures included.

        Raises:
            agentrig.errors.RunStopped: Too many failures, no triplets, no token ids, or the same reward
                for the whole step (in the first step: immediately; later: when it stays the same and the
                rollouts are not correct). The message says what was observed.
        """

    def check_failures(self, rollouts: Sequence[Rollout], *, step: int) -> None:
        """Stop the run if more of these training rollouts failed than `run.failure_limit` allows, or all of them.

        `rollouts` does this itself, except for an algorithm that trains prompts: that samples failures again first.

        Raises:
            agentrig.errors.RunStopped: The message has the failures by kind.
        """

    def validate(self, endpoint: Endpoint | Sequence[Endpoint], *, step: int) -> float | None:
        """Return the accuracy on the validation split (greedy unless the run says otherwise).

        Sets `measured`, which also has the mean reward. None without validation tasks or without any reward.
        """

    def report(
        self, endpoint: Endpoint | Sequence[Endpoint], *, when: Literal["before", "after"], step: int
    ) -> float | None:
        """Measure the held-out accuracy that `summary.json` states; once before and once after training."""

    def sketch(self, step: int) -> Sketch:
        """Return what to fill during a step's updates, whether the run's auditor looks at this step or not.

        Call `take` right before each `optimizer.step()` and `after` right behind it. An algorithm that does not ask
        for it has fewer links audited; the report names them.
        """

    def end_step(
        self,
        step: int,
        *,
        metrics: Mapping[str, float],
        time_s: Mapping[str, float],
        digests: Mapping[str, Any] | None = None,
        calls: Iterable[Entry] | None = None,
    ) -> None:
        """Close a training step: metrics, observers, checks.

        Args:
            metrics: The algorithm's figures, without those that have no value in this step. `weight_change` (L2 norm
                of the step's change of all trained weights) is required, except of one that trains prompts: 0.0 twice
                in a row, or NaN, stops the run. `loss` and `grad_norm` (L2 norm of the gradient before clipping) are
                checked if present: NaN or infinity twice in a row stops the run.
            time_s: Wall seconds by part. The report plots `rollout`, `reward` and `update`; others
                may be added.
            digests: What a resumed run and the auditor need to know of the learner: `weights`, a digest of the new
                weights, and `dtype`, what it computes in.
            calls: What was done with each call of the step's triplets, counted where the loss is computed, see
                `agentrig.ledger`. None: the report says that the algorithm doesn't say.

        Raises:
            agentrig.errors.RunStopped: See `metrics`; or `calls` are not the calls that the algorithm got.
        """

    def note(self, text: str) -> None:
        """Log a fact about this run that a reader of its results needs, and put it into the report.

        Args:
            text: One sentence without a full stop, for example which of two ways of training was taken, and why.
        """

    def plan_steps(self, steps: int) -> None:
        """Set the number of training steps, for the display; call it once, before the first rollouts.

        `on_run_start` is called then, or with the first rollouts if `plan_steps` is not called. A resumed run waits
        here for the proof of the transfer that has begun, and then rewrites its directory: load everything before.
        """

    def save_checkpoint(self, step: int, write: Callable[[Path], None], *, keep: bool = False) -> Path:
        """Save a checkpoint and make it the run's latest, atomically.

        Call it after the step's `end_step`: a run that is killed in between repeats the step. In the opposite
        order the step's metrics would be lost.

        Args:
            write: Called with a fresh directory; must leave a Hugging Face directory there, and the
                optimizer's state under `trainer/`.
            keep: Whether the checkpoint is kept forever; of the others only the latest two are kept. If saving
                is cheap, save at every step: a crash then loses only the current step.
        """


class LoopAlgorithm(Protocol):
    """What `AlgorithmSpec.build` returns for an algorithm in the run's own loop, `agentrig.run.loop`.

    It may also have a method `fit(plan, session) -> ServerPlan`, which plans the device's memory for server and learner
    together: called after `serving`, before the server starts, it returns the plan with `memory` and `sleeps`. With
    `borrow(server)`, called before `learner`, it gets the server, whose weights its learner may read.

    If its settings have a key `demonstrations` (see `sft`), training rollouts are demonstrations and nothing is
    sampled: the credit is `agentrig.credit.imitate`, and the learner has the method of `agentrig.learners.Imitating`.
    """

    @property
    def config(self) -> LoopSettings:
        """Its settings, with those of the loop."""

    def serving(self, hardware: Hardware, checkpoint: Path | None) -> ServerPlan:
        """Return how to serve a checkpoint, or the starting model; `dtype` is what the learner computes in.

        A run, resumed or not, starts its server with the starting model and delivers the learner's weights to it.

        Raises:
            agentrig.errors.ConfigError: There is no such model, or settings and hardware do not go with it.
        """

    def learner(self, session: Session) -> Learner:
        """Return the learner with the starting weights, on `session.hardware`; a resumed run calls its `load` then."""


class Algorithm(Protocol):
    """What `AlgorithmSpec.build` returns for an algorithm with a loop of its own.

    It may also have an attribute `pool`, an `agentrig.pools.MakePool`: its runners are then used instead of those of
    `[runners] use`. If its spec has `runners=True`, `pool` gets one more argument, `make`: the `MakePool` of the
    runners that the run names, or None if it names none. An algorithm that starts a cluster makes its pool later.

    """

    def run(self, session: Session) -> None:
        """Train: roll out, learn, `end_step`, until the steps are done, `session.stopping` or `session.solved`."""

    def serve(
        self, *, hardware: Hardware, checkpoint: Path | None
    ) -> AbstractContextManager[Endpoint | Sequence[Endpoint]]:
        """Serve a checkpoint (None: the starting model) without training, for `eval` and `dev`; several are replicas.

        If the spec has `server=True`, it is called with one more argument, `server`: a callable
        `server(plan) -> agentrig.servers.Server`, as `Session.server` is.
        """
