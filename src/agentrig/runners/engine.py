"""Rollouts: tasks go in, scored and adapted rollouts come out."""

from __future__ import annotations

import queue
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from agentrig.adapters import Adapter, identified
from agentrig.agents import Outcome
from agentrig.endpoints import Endpoint, unrecorded_calls
from agentrig.errors import place_of
from agentrig.pools import Job, Result
from agentrig.processes.put_back import put_back
from agentrig.rollouts import Mode, OnGroups, Rollout
from agentrig.runners.runtime import Results, Runtime
from agentrig.runners.scorer import Scorer
from agentrig.tasks import Task
from agentrig.text import words_of
from agentrig.traces import SENT, SERVER, Trace

STALE = "stale-weights"
"""The failure of a rollout with a call that older weights answered than its step allows."""

UNKNOWN = "unknown-weights"
"""The failure of a rollout with a call that newer weights answered than the server was given."""


@attrs.frozen(kw_only=True)
class Versions:
    """The versions of the weights that a batch of rollouts may be sampled with.

    Attributes:
        served: What the server has while they run: the step that made these weights.
        oldest: The oldest that is allowed.
    """

    served: int
    oldest: int

    @classmethod
    def of(cls, version: int, *, step: int, max_staleness: int) -> Versions:
        """Return the versions that a step allows.

        Args:
            step: The training step that learns from the rollouts. Its update begins with the weights of `step - 1`.
            max_staleness: How many versions the rollouts may be behind these.

        Raises:
            ValueError: The server itself has other weights than these.
        """
        oldest = step - 1 - max_staleness
        if not oldest <= version <= step - 1:
            allowed = f"{oldest} to {step - 1}" if max_staleness else f"{oldest}"
            raise ValueError(
                f"rollouts of step {step} would be sampled with weights of version {version}; with max_staleness = "
                f"{max_staleness} it takes version {allowed}"
            )
        return cls(served=version, oldest=oldest)

    def refused(self, trace: Trace) -> Outcome | None:
        """Return the failure of a rollout whose calls other weights answered; None if all are allowed, or unknown."""
        for span, version in trace.versions().items():
            if self.oldest <= version <= self.served:
                continue
            allowed = f"{self.oldest} to {self.served}" if self.oldest < self.served else f"{self.served}"
            return Outcome(
                failure=STALE if version < self.oldest else UNKNOWN,
                message=f"call {span} was answered with weights of version {version}; its step takes version {allowed}",
            )
        return None


JOB_MODES: Mapping[Mode, str] = {"train": "train", "validation": "val", "report": "test", "dev": "val"}


class RolloutEngine:
    """Runs an agent on tasks, scores the outcomes, adapts the traces.

    Args:
        whole_rows: Whether the agent gets whole rows, with their gold (`AgentSpec.whole_rows`).
        prompts: The agent's prompts, name to template.

    Attributes:
        as_mode: The mode that an agent of Agent Lightning sees; None for the mode of each `run`.
        prompts: The agent's prompts in force, for the rollouts of the next `run`.
        unrecorded: How many calls came to the model's server during the last `run` that no tracer recorded.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        scorer: Scorer,
        adapter: Adapter,
        on_rollout: Callable[[Rollout], None] = lambda rollout: None,
        whole_rows: bool = False,
        prompts: Mapping[str, str] | None = None,
    ) -> None:
        self.as_mode: Mode | None = None
        self.prompts: Mapping[str, str] = prompts or {}
        self.unrecorded = 0
        self.adapter = adapter
        self.scorer = scorer
        self._runtime, self._on_rollout, self._whole_rows = runtime, on_rollout, whole_rows

    def given(self, task: Task) -> Any:
        """Return what the agent gets of a task."""
        return task.given(whole=self._whole_rows)

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
        first: int = 0,
    ) -> list[Rollout]:
        """Run the agent n times on each task; the n rollouts of a task are side by side in the result.

        Finished rollouts are scored while others still run. Every rollout is returned once, failures
        included. With several endpoints, groups are assigned in turn, and a whole group uses the same
        one: this balances the load and lets each server cache its groups' prompts. For `on_groups` see
        `Session.rollouts`. A rollout of other weights than `versions` is a failure; with None any are allowed.
        `first` is the number of the first group, for a step with several batches.
        """
        endpoints = [endpoint] if isinstance(endpoint, Endpoint) else list(endpoint)
        waiting: dict[str, tuple[Task, str]] = {}
        jobs = []
        for i, task in enumerate(tasks):
            given = self.given(task)
            for _ in range(n):
                job = Job(
                    id=f"ro-{uuid.uuid4().hex[:16]}",
                    input=dict(given) if isinstance(given, Mapping) else given,
                    endpoint=endpoints[i % len(endpoints)],
                    mode=JOB_MODES[self.as_mode or mode],
                    measured=mode != "train",
                    prompts=self.prompts,
                )
                waiting[job.id] = task, f"{mode}-{step}-{first + i}"
                jobs.append(job)
        ids = list(waiting)
        groups = [ids[i : i + n] for i in range(0, len(ids), n)]
        places = {rollout_id: i for i, group in enumerate(groups) for rollout_id in group}
        arriving: Results = queue.SimpleQueue()
        before = unrecorded_calls(endpoints)
        self._runtime.submit(jobs, arriving)
        done: dict[str, Rollout] = {}
        while len(done) < len(ids):
            arrived = [arriving.get()]  # waits for one, and takes all that are there
            while not arriving.empty():
                arrived.append(arriving.get())
            for error in arrived:
                if isinstance(error, Exception):
                    raise error
            results = [r for r in arrived if isinstance(r, Result)]
            for rollout in self.scored(results, waiting, step=step, mode=mode, versions=versions):
                done[rollout.id] = rollout
            if on_groups is not None:
                complete = [i for i in {places[r.id] for r in results} if done.keys() >= set(groups[i])]
                if complete:
                    on_groups({i: [done[rollout_id] for rollout_id in groups[i]] for i in complete})
        # A tracer other than the run's own records calls without the header.
        others = [c for r in done.values() for c in r.trace.llm_calls() if not c.attributes.keys() & {SENT, SERVER}]
        self.unrecorded = max(0, unrecorded_calls(endpoints) - before - len(others))
        return [done[i] for i in ids]

    def scored(
        self,
        results: Sequence[Result],
        waiting: Mapping[str, tuple[Task, str]],
        *,
        step: int,
        mode: Mode,
        versions: Versions | None = None,
    ) -> list[Rollout]:
        """Score and adapt results, and call `on_rollout`; `waiting` has the task and the group of each id."""
        start, waited_s = time.perf_counter(), self.scorer.waited_s
        if versions is not None:
            results = [
                attrs.evolve(r, outcome=refused)
                if r.outcome.failure is None and (refused := versions.refused(r.trace))
                else r
                for r in results
            ]
        answered = [r for r in results if r.outcome.failure is None]
        scored = self.scorer([(waiting[r.id][0], r.outcome, r.trace) for r in answered])
        scores = {r.id: score for r, score in zip(answered, scored, strict=True)}
        wall_s = time.perf_counter() - start - (self.scorer.waited_s - waited_s)  # its process starts but once
        reward_s = max(0.0, wall_s) / max(1, len(answered))
        rollouts = []
        for result in results:
            task, group = waiting[result.id]
            rollout = Rollout(
                id=result.id,
                task=task,
                group=group,
                mode=mode,
                step=step,
                outcome=result.outcome,
                score=scores.get(result.id),
                trace=result.trace,
                start=result.start,
                duration_s=result.duration_s,
                reward_s=reward_s if result.id in scores else 0.0,
                version=min(result.trace.versions().values(), default=versions.served if versions else None),
            )
            rollouts.append(self._adapt(rollout))
            self._on_rollout(rollouts[-1])
        return rollouts

    def _adapt(self, rollout: Rollout) -> Rollout:
        """Add the triplets of a rollout that did not fail; if the adapter raises, the rollout fails."""
        if rollout.failure is not None:
            return rollout
        try:
            with put_back("the adapter"):
                kept = identified(self.adapter(rollout.trace), rollout.trace)
            # Rewards that the agent itself gave to its calls hold only if the last of them is the rollout's reward.
            own = rollout.value in (rollout.outcome.answer, rollout.outcome.own_reward)
            triplets = tuple(t if own and t.reward is not None else attrs.evolve(t, reward=rollout.value) for t in kept)
        except (Exception, SystemExit) as error:
            outcome = Outcome(failure="adapter-error", message=words_of(error) + place_of(error))
            return attrs.evolve(rollout, outcome=outcome, score=None)
        return attrs.evolve(rollout, triplets=triplets)
