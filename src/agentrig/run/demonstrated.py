"""Training rollouts that are demonstrations: nothing is sampled, and the rest of the loop stays as it is.

`algorithm.demonstrations` says where they come from:

    tasks    the agent plays a step's tasks, and a demonstrator answers its calls → the reward scores what it answers
    RUN      the rollouts that an earlier run's reward accepted, of each task the different answers → scored again
    FILE     the chats of a JSONL file, the last reply of each; the agent plays no part, so nothing is scored

What the reward does not accept is not learned: it is counted, and named once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agentrig.errors import ConfigError, RunStopped
from agentrig.learners import Imitating
from agentrig.rollouts import Rollout
from agentrig.run.demonstration_server import demonstrating
from agentrig.run.metrics import line_of
from agentrig.run.recorded import Recorded
from agentrig.tasks import tasks_of_step

if TYPE_CHECKING:
    from agentrig.run.session import RunSession

log = logging.getLogger(__name__)

TASKS = "tasks"
"""The value of `algorithm.demonstrations` for those of the training tasks."""

REJECTED = 0.5
"""Largest share of a run's demonstrations that the reward may reject."""

SHOWN = 3
"""How many examples a message has."""


class Demonstrated:
    """The demonstrations of a run.

    Args:
        session: The run's.
        source: `algorithm.demonstrations`.

    Raises:
        ConfigError: There is no such run or file, or nothing in it can be learned; or a task has no gold.
        AgentrigError: A file cannot be read.
    """

    def __init__(self, session: RunSession, source: str) -> None:
        self._session, self._who = session, source
        self._learner: Imitating
        self._recorded = None if source == TASKS else Recorded(session, Path(source))
        self._named = set[str]()
        self._seen = self._rejected = 0  # before the run was resumed, too
        for line in session.lines:
            scored = line["rollouts"] - sum(line["failures"].values())
            self._seen += scored
            self._rejected += scored - round(scored * (line.get("accuracy") or 0.0))
        if self._recorded is None:
            if not session.plan.runners.n:
                raise ConfigError(
                    "algorithm.demonstrations = tasks: demonstrations are served on this machine only: give it "
                    "runners, for example runners.n=2"
                )
            self._says, self._who = session.plan.demonstrator(session.train_tasks)

    def begin(self, learner: object, name: str) -> None:
        """Take the learner, and leave out what its model can't learn.

        Args:
            learner: The run's.
            name: Of the algorithm, for messages.

        Raises:
            ConfigError: It can't learn from demonstrations, or from none of these.
        """
        if not isinstance(learner, Imitating):
            raise ConfigError(f"algorithm {name} has a key `demonstrations`, and its learner has no method `encode`")
        self._learner = learner
        if self._recorded is not None:
            self._recorded.begin(learner)

    def rollouts(self, step: int, n: int) -> list[Rollout]:
        """Return a step's demonstrations, scored and stored.

        Args:
            step: The step.
            n: How many.

        Raises:
            RunStopped: The reward rejects most of them; or see `agentrig.algorithms.Session.rollouts`.
        """
        session = self._session
        if self._recorded is not None:
            found = self._recorded.rollouts(step, n)
        else:
            tasks = tasks_of_step(session.train_tasks, n=n, step=step, seed=session.seed)
            seed = f"{session.seed} {step}"
            with demonstrating(tasks, self._says, seed=seed, encode=self._learner.encode) as (endpoints, _):
                found = session.rollouts(tasks, n=1, endpoint=endpoints, step=step)
        self._check(found, step)
        return found

    def _check(self, rollouts: Sequence[Rollout], step: int) -> None:
        """Name the demonstrations that the reward rejects, each task once, and stop if it rejects most."""
        scored = [r for r in rollouts if r.failure is None]
        wrong = [r for r in scored if not r.correct]
        new = [r for r in wrong if r.task.id not in self._named]
        shown = "\n".join(f"  {line_of(r)}" for r in (new or wrong)[:SHOWN])
        self._named.update(r.task.id for r in new)
        self._seen, self._rejected = self._seen + len(scored), self._rejected + len(wrong)
        if self._rejected > REJECTED * self._seen:
            reward = self._session.plan.components["reward"].spec.name
            raise RunStopped(
                f"step {step}: the reward {reward} does not count {self._rejected} of {self._seen} demonstrations by "
                f"{self._who} as correct, so they are not learned:\n{shown}\n  Does the agent change what the model "
                "answers, or does the reward want another form? (docs/how-to/laptop.md)",
                cause="demonstrations-rejected",
            )
        if new:
            log.warning(
                "step %d: the reward does not count %d of %d demonstrations as correct; they are not learned:\n%s",
                *(step, len(wrong), len(scored), shown),
            )
