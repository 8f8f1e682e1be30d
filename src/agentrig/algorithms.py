"""Algorithms: from triplets to new weights, and the session that a run lends to them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Protocol

import attrs

from agentrig._moved import former
from agentrig.endpoints import Endpoint
from agentrig.hardware import Hardware
from agentrig.rollouts import Mode, OnGroups, Rollout
from agentrig.tasks import Task


@attrs.frozen(kw_only=True)
class Measurement:
    """What a measurement found, over the rollouts that could be judged.

    Attributes:
        accuracy: The share of them that is correct, from 0 to 1; None without any.
        reward: Their mean reward; None without any.
        n: How many they are.
    """

    accuracy: float | None
    reward: float | None
    n: int

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> Measurement:
        """Measure rollouts."""
        values = [r.value for r in rollouts if r.value is not None]
        right = sum(bool(r.correct) for r in rollouts)
        n = len(values)
        return cls(accuracy=right / n if n else None, reward=statistics.fmean(values) if n else None, n=n)


class Session(Protocol):
    """What a run lends to its algorithm.

    Attributes:
        train_tasks: The training split.
        directory: The run directory.
        hardware: What the algorithm runs on.
        seed: The run's seed; derive every random stream from it.
        first_step: 1, or the step after the last checkpoint when the run is resumed.
        checkpoint: The checkpoint to start from when the run is resumed, else None.
        stopping: True once the user asked to end (Ctrl-C): finish the step, save, return.
        solved: True once every rollout of three steps running got the same reward and is correct: there is nothing
            left to learn. Finish the step, save, `report` "after", return; the run has then ended well.
        measured: What `validate` or `report` found last: accuracy and mean reward; None before the first.
    """

    train_tasks: Sequence[Task]
    directory: Path
    hardware: Hardware
    seed: int
    first_step: int
    checkpoint: Path | None
    stopping: bool
    solved: bool
    measured: Measurement | None

    @property
    def lines(self) -> Sequence[Mapping[str, Any]]:
        """The lines of `metrics.jsonl` up to now, those before a resume among them.

        What an algorithm counts over several steps it rebuilds from them: a resumed run then does what an unbroken
        one would.
        """
        ...

    def rollouts(
        self,
        tasks: Sequence[Task],
        *,
        n: int,
        endpoint: Endpoint | Sequence[Endpoint],
        step: int,
        mode: Mode = "train",
        on_groups: OnGroups | None = None,
    ) -> list[Rollout]:
        """Run the agent n times on each task; block until all have ended.

        Args:
            tasks: What to run.
            n: The group's size.
            endpoint: One server, or several replicas: a whole group goes to the same one, in turn.
            step: The training step.
            mode: What the rollouts are for.
            on_groups: Called in this thread with groups that are complete while others still run, each once, before
                the checks of the step: work that it does then costs no time of its own.

        Returns:
            `len(tasks) * n` rollouts, the n of one task side by side, failures included.

        Raises:
            agentrig.errors.RunStopped: Too many failures, no triplets, no token ids, or a reward
                that is the same over the whole step (in the first step at once; later when that stays
                and they are not correct): the message says what was seen.
        """
        ...

    def validate(self, endpoint: Endpoint | Sequence[Endpoint], *, step: int) -> float | None:
        """Return the accuracy on the validation split (greedy unless the run says otherwise).

        The mean reward is in `measured` then. None when there is nothing to validate on, or nothing could be judged.
        """
        ...

    def report(
        self, endpoint: Endpoint | Sequence[Endpoint], *, when: Literal["before", "after"], step: int
    ) -> float | None:
        """Measure the held-out accuracy that `summary.json` states; once before and once after training."""
        ...

    def end_step(self, step: int, *, metrics: Mapping[str, float], time_s: Mapping[str, float]) -> None:
        """Close a training step: metrics, observers, checks.

        Args:
            metrics: The algorithm's figures. `weight_change` (L2 norm of the step's change of all
                trained weights) is required: 0.0 twice running, or NaN, stops the run. `loss` and
                `grad_norm` (L2 norm of the gradient before clipping) are looked at where they are there:
                NaN or infinity twice running stops the run.
            time_s: Wall seconds by part; `rollout`, `reward` and `update` are drawn in the report,
                others may be added.
        """
        ...

    def plan_steps(self, steps: int) -> None:
        """Say how many training steps are planned, for the display; call it once, before the first rollouts.

        Observers hear of the run's start then, or with its first rollouts when it is not called.
        """
        ...

    def save_checkpoint(self, step: int, write: Callable[[Path], None], *, keep: bool = False) -> Path:
        """Save a checkpoint and make it the run's latest, atomically.

        Call it after the step's `end_step`: a run that is killed in between then repeats the step, while the
        other way round its line of metrics would be lost.

        Args:
            write: Called with a fresh directory; must leave a Hugging Face directory there, and the
                optimizer's state under `trainer/`.
            keep: Whether it stays for good; of the others only the latest two do. Save at every
                step where that is cheap: a crash then loses only the step under way.
        """
        ...


class Algorithm(Protocol):
    """What `AlgorithmSpec.build` returns.

    It may also have an attribute `pool`: a callable with the arguments of `agentrig.runners.processes.Pool`, used in
    its place (runners elsewhere than on this machine).
    """

    def run(self, session: Session) -> None:
        """Train: roll out, learn, `end_step`, until the steps are done, `session.stopping` or `session.solved`."""
        ...

    def serve(self, *, hardware: Hardware, checkpoint: Path | None) -> AbstractContextManager[Endpoint]:
        """Serve a checkpoint (None: the starting model) without training, for `eval` and `dev`."""
        ...


__getattr__ = former(__name__)
