"""A session with the rollouts that a run has recorded: the agent does not run, and no observer is called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from agentrig.adapters import Adapter
from agentrig.endpoints import Endpoint
from agentrig.errors import AgentrigError, ConfigError, RunStopped
from agentrig.ledger import Entry
from agentrig.rollouts import Mode, OnGroups, Rollout
from agentrig.run.ahead import RolloutsAhead
from agentrig.run.checkpoints import Checkpoints
from agentrig.run.damage import reading
from agentrig.run.rows import rollout_of
from agentrig.run.session import RunSession
from agentrig.runners.engine import RolloutEngine
from agentrig.runners.runtime import Runtime
from agentrig.runners.scorer import Scorer
from agentrig.runners.versions import Versions
from agentrig.tasks import Task


class Replayed(Exception):
    """Ends an algorithm that continues after the repeated step."""


def read_rollouts(file: Path, tasks: Mapping[str, Task]) -> tuple[list[Rollout], list[dict[str, Any]]]:
    """Return the rollouts of a Parquet file without triplets, in their order, and their rows.

    Raises:
        RunFileError: The file is damaged; the message says where.
    """
    import pyarrow.parquet as pq

    with reading(file, "Restore it from a copy: without its rollouts the step cannot be repeated"):
        rows = pq.read_table(file).to_pylist()
        return [rollout_of(row, tasks) for row in rows], rows


class RecordedEngine(RolloutEngine):
    """Returns recorded rollouts, and runs the adapter on their traces.

    Args:
        rollouts: The rollouts of one step, in their order, without triplets.
        step: That step.

    Attributes:
        requested: How the tasks that the algorithm requested differ from the recorded ones, as text; '' if they do
            not; None before it has requested any.
        returned: The rollouts with their triplets.
    """

    def __init__(
        self, rollouts: Sequence[Rollout], *, step: int, runtime: Runtime, scorer: Scorer, adapter: Adapter
    ) -> None:
        super().__init__(runtime, scorer=scorer, adapter=adapter)
        self._recorded, self._step = rollouts, step
        self.requested: str | None = None
        self.returned: list[Rollout] = []

    def run(
        self,
        tasks: Sequence[Task],
        *,
        n: int,
        endpoint: Endpoint | Sequence[Endpoint],
        step: int,
        mode: Mode,
        on_groups: OnGroups | None = None,
        versions: Versions | None = None,
    ) -> list[Rollout]:
        """Return the recorded rollouts; there must be as many as the algorithm requests."""
        if step != self._step or self.requested is not None:
            raise Replayed
        wanted, there = [task.id for task in tasks for _ in range(n)], [r.task.id for r in self._recorded]
        if len(wanted) != len(there):
            raise ConfigError(
                f"the algorithm asks for {len(tasks)} tasks with {n} rollouts each, and the run has recorded "
                f"{len(there)} rollouts in step {step}. It was recorded with other settings, or by another version"
            )
        other = [(w, t) for w, t in zip(wanted, there, strict=True) if w != t]
        self.requested = ""
        if other:
            self.requested = (
                f"{len(other)} of {len(there)} rollouts are of other tasks than the algorithm asks for: the first is "
                f"of {other[0][1]}, and it asks for {other[0][0]}. Task set, seed or the choice of tasks has changed"
            )
        self.returned = [self._adapt(r) for r in self._recorded]
        if on_groups is not None:
            on_groups({i: self.returned[i * n : (i + 1) * n] for i in range(len(tasks))})
        return self.returned


class RecordedSession(RunSession):
    """The session of one repeated step: see `RunSession` for its arguments; `engine` is a `RecordedEngine`.

    Attributes:
        stopped: The message of the guard that would have stopped the run in this step, or ''.
    """

    stopped = ""

    @property
    def saved(self) -> Checkpoints:
        """The checkpoints that the repeated step has saved in a temporary folder."""
        return self._run.checkpoints

    def begin(self, steps: int | None = None) -> None:
        """Do nothing: no observer is notified, and no run directory changes."""

    def plan_steps(self, steps: int) -> None:
        """Do nothing: there is no display."""

    def validate(self, endpoint: Endpoint | Sequence[Endpoint], *, step: int) -> float | None:
        """Return None: a repeated step does no evaluation."""
        return None

    def report(
        self, endpoint: Endpoint | Sequence[Endpoint], *, when: Literal["before", "after"], step: int
    ) -> float | None:
        """Return None: a repeated step does no evaluation."""
        return None

    def end_step(
        self,
        step: int,
        *,
        metrics: Mapping[str, float],
        time_s: Mapping[str, float],
        digests: Mapping[str, Any] | None = None,
        calls: Iterable[Entry] | None = None,
    ) -> None:
        """Close the step, and ask the algorithm to end."""
        try:
            super().end_step(step, metrics=metrics, time_s=time_s, digests=digests, calls=calls)
        except RunStopped as error:
            self.stopped = str(error)
        self.stopping = True

    def begin_rollouts(self, tasks: Sequence[Task], *, step: int, **_: Any) -> RolloutsAhead:
        """Run nothing: only one step is repeated, and an algorithm that asks for the next one's rollouts ends there."""

        def none(ahead: RolloutsAhead, rollouts: Sequence[Rollout]) -> None:
            """Do nothing: nobody has waited."""

        def end(ahead: RolloutsAhead, rollouts: Sequence[Rollout]) -> None:
            raise Replayed

        return RolloutsAhead(list, step=step, waited=none, file=end)

    def foreign(self, **how: Any) -> NoReturn:
        """Refuse: the algorithm runs the agent itself.

        Raises:
            AgentrigError: Always.
        """
        raise AgentrigError("this algorithm runs the agent itself: it cannot use recorded rollouts")
