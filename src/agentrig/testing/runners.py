"""The checks of runners: what a run relies on, with an agent that raises, hangs, dies and leaves processes."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import psutil

from agentrig.endpoints import Endpoint
from agentrig.errors import AgentrigError
from agentrig.pools import Job, Result, RunnerPool
from agentrig.runners.jobs import AgentPlan
from agentrig.testing import runners_agent
from agentrig.testing.elsewhere import left, living
from agentrig.testing.kit import basic
from agentrig.testing.runners_agent import described
from agentrig.testing.subject import CheckFailed, CheckSkipped, Subject

NOWHERE = Endpoint(base_url="http://127.0.0.1:9/v1", model="kit", sampling={"temperature": 0.5}, headers={"x-kit": "é"})
SECRET = "KIT_OF_RUNNERS_KEY"
HANDLED_S = 2.0
"""The deadline of the rollout that hangs, in seconds."""

LONG_S = 300.0
"""A deadline that nothing here reaches, in seconds."""


@attrs.define(kw_only=True, eq=False, slots=False)
class RunnersSubject(Subject):
    """Runners, and the agent that they run.

    Attributes:
        start_s: Seconds that a runner may take to find its place and to build the agent.
        ends_s: Seconds that processes may take to end after `close`.
    """

    start_s: float = 60.0
    ends_s: float = 3.0

    def pool(self, agent: str = "kit-doer", **limits: Any) -> RunnerPool:
        """Return a pool that is closed at the end."""
        plan = AgentPlan(name=agent, config={}, files=(str(Path(runners_agent.__file__)),))
        made: RunnerPool = self.made(plan, **{"n": 1, "threads": 2, "deadline_s": LONG_S, "retries": 1, **limits})
        self.opened.callback(made.close)
        return made

    @cached_property
    def shared(self) -> RunnerPool:
        """The pool of the checks that end no runner."""
        with mock.patch.dict(os.environ, {SECRET: "secret"}):
            pool = self.pool()
            if not pool.build_first(self.start_s):
                raise CheckFailed(
                    f"no runner has built the agent within {self.start_s:g} s",
                    "Let `build_first` start one runner and wait for it; a slower start: the option start_s.",
                )
            pool.start()
        return pool

    def run(self, pool: RunnerPool, *jobs: Job) -> list[Result]:
        """Submit jobs and return their results in the order of the jobs.

        Raises:
            CheckFailed: One did not come back once.
        """
        for job in jobs:
            pool.submit(job)
        found: list[Result] = []
        end = time.monotonic() + self.start_s
        while pool.pending and time.monotonic() < end:
            found += pool.poll(0.1)
        found += pool.poll(0.1)
        counts = Counter(r.id for r in found)
        for job in jobs:
            if counts[job.id] != 1:
                raise CheckFailed(f"the job {job.id} ({job.input['do']}) came back {counts[job.id]} times")
        by_id = {r.id: r for r in found}
        return [by_id[job.id] for job in jobs]


def job(name: str, do: str = "describe", **more: Any) -> Job:
    """Return a job for the kit's agent."""
    return Job(**{"id": name, "input": {"do": do, "text": f"{name} ü\n"}, "endpoint": NOWHERE, **more})


def check_builds(subject: RunnersSubject) -> None:
    """An agent that cannot be built is an error with its reason.

    Why: A run would wait for an agent that never comes, without a reason.
    Cure: Raise an AgentrigError with the agent's own error from `build_first` and `poll`.
    """
    pool = subject.pool("kit-unbuilt")
    end = time.monotonic() + subject.start_s
    try:
        pool.build_first(subject.start_s)
        while time.monotonic() < end:
            pool.poll(0.1)
    except AgentrigError as error:
        if "the agent of the kit cannot be built" not in str(error):
            raise CheckFailed(f"the error does not have the agent's own: {error}") from error
        return
    raise CheckFailed(f"an agent that cannot be built raised nothing within {subject.start_s:g} s")


@basic
def check_results_once(subject: RunnersSubject) -> None:
    """Every job comes back once, with its own answer.

    Why: A rollout that is lost stops the step; one that comes twice counts twice in its group's baseline.
    Cure: Return each job's result from `poll` once, with the job's id.
    """
    jobs = [job(f"job-{i}") for i in range(24)]
    for asked, result in zip(jobs, subject.run(subject.shared, *jobs), strict=True):
        answer = result.outcome.answer
        if result.outcome.failure or answer["input"]["text"] != asked.input["text"]:
            raise CheckFailed(f"{asked.id} came back with another answer: {answer!r:.100} {result.outcome.message}")


def check_sends_whole_jobs(subject: RunnersSubject) -> None:
    """Every field of a job reaches the agent.

    Why: An agent would see another task, another model or another mode than the run gave it.
    Cure: Send the job as it is: it can be pickled. Its result comes as JSON: see agentrig.pools.Result.packed.
    """
    given = job(
        "whole",
        input={"do": "describe", "nested": [{"a": [1, 2.5, None, True]}], "text": "日本" * 1000},
        mode="val",
        attempt_id="at-1",
        config={"timeout_seconds": 3.0},
        metadata={"origin": "kit"},
        resources={"main": {"x": 1}},
        resources_id="rs-1",
    )
    (result,) = subject.run(subject.shared, given)
    want, got = described(given), result.outcome.answer or {}
    changed = sorted(name for name in want if got.get(name) != want[name])
    if changed:
        raise CheckFailed(f"the agent got another {', '.join(changed)}: {result.outcome.message or got!r:.300}")


def check_types_failures(subject: RunnersSubject) -> None:
    """An agent that raises, or returns what is no JSON, is a failure with a kind.

    Why: One bad rollout would end the run, or count as a reward of 0.
    Cure: Run jobs by agentrig.runners.attempt.packed, which returns a failure for whatever the agent does.
    """
    results = subject.run(subject.shared, job("raises", "raise"), job("answers", "object"), job("fine"))
    kinds = [r.outcome.failure for r in results]
    if kinds != ["agent-error", "bad-answer", None]:
        raise CheckFailed(f"an agent that raises, one that returns an object and a good one gave {kinds}")


def check_keeps_keys(subject: RunnersSubject) -> None:
    """The runner does not have a variable of the run that the agent does not declare.

    Why: The agent, and whatever the model makes it do, could read the run's API keys.
    Cure: Call agentrig.processes.confine.confine in the runner before the agent is built.
    """
    (result,) = subject.run(subject.shared, job("environment", "environment"))
    if SECRET in (result.outcome.answer or ()):
        raise CheckFailed(f"the runner has the run's variable {SECRET}, which its agent does not declare")


def check_counts(subject: RunnersSubject) -> None:
    """The pool's own figures are true, before and after a job.

    Why: The run gives work by these figures: it would wait for ever, or queue rollouts whose deadlines run out.
    Cure: Let `room` be runners times threads minus `pending`, and return the limits that the pool was made with.
    """
    pool = subject.shared
    idle = (pool.n, pool.deadline_s, pool.retries, pool.room, pool.pending, pool.built.is_set())
    if idle != (1, LONG_S, 1, 2, 0, True):
        raise CheckFailed(f"n, deadline_s, retries, room, pending, built of an idle pool of 1 times 2 are {idle}")
    pool.submit(job("counted"))
    busy = (pool.room, pool.pending)
    subject.run(pool)
    if busy != (1, 1):
        raise CheckFailed(f"room and pending with one job are {busy}, not (1, 1)")


def check_wakes(subject: RunnersSubject) -> None:
    """A poll that waits ends when it is woken.

    Why: Rollouts would wait until a poll ends by itself: each step would be slower.
    Cure: Let `wake`, called in another thread, end a `poll` that waits.
    """
    timer = threading.Timer(0.2, subject.shared.wake)
    start = time.monotonic()
    timer.start()
    subject.shared.poll(8.0)
    if time.monotonic() - start > 6.0:
        raise CheckFailed("a poll of 8 s was woken after 0.2 s and went on")


def check_keeps_deadlines(subject: RunnersSubject) -> None:
    """A rollout that hangs fails with `deadline`; the pool goes on.

    Why: One agent that hangs would stop its step for ever.
    Cure: Kill the runner of a rollout that runs past deadline_s; fail it with `deadline`, repeat the others.
    """
    pool = subject.pool(deadline_s=HANDLED_S, threads=1, retries=9)
    hangs, fine = subject.run(pool, job("hangs", "hang"), job("fine"))
    if (hangs.outcome.failure, fine.outcome.failure) != ("deadline", None):
        raise CheckFailed(f"a rollout that hangs gave {hangs.outcome.failure!r}, the next {fine.outcome.failure!r}")


def check_repeats_lost(subject: RunnersSubject) -> None:
    """A rollout whose runner died starts again; after the last retry it fails.

    Why: A runner that dies would lose its rollouts, or a rollout that kills its runner would come back for ever.
    Cure: Submit `job.again()` when a runner dies, at most `retries` times; then fail it with `runner-died`.
    """
    pool = subject.pool(threads=1)
    once, always, fine = subject.run(pool, job("once", "die-once"), job("always", "die"), job("fine"))
    kinds = [r.outcome.failure for r in (once, always, fine)]
    if kinds != [None, "runner-died", None]:
        raise CheckFailed(f"with retries=1, a runner that dies once, one that always dies and a good one gave {kinds}")
    if once.outcome.answer["attempt"] != 2:
        raise CheckFailed(f"a rollout that started again says it is attempt {once.outcome.answer['attempt']}, not 2")


def check_leaves_nothing(subject: RunnersSubject) -> None:
    """After `close`, no process of a runner or its agent is left; a second `close` does nothing.

    Why: Each run would leave processes that take memory, and may still write files.
    Cure: End each runner together with all processes that its agent started, detached ones too.
    """
    pool = subject.pool()
    (result,) = subject.run(pool, job("child", "child"))
    answer = result.outcome.answer or {}
    pids = {name: pid for name, pid in answer.items() if psutil.pid_exists(pid)}
    if not pids:
        raise CheckSkipped("its runners are on other machines: their processes cannot be seen from here")
    processes = [psutil.Process(pid) for pid in {*pids.values(), *pool.processes()}]
    pool.close()
    pool.close()
    if alive := left(lambda: living(processes), subject.ends_s):
        names = [next((name for name, pid in pids.items() if pid == p.pid), "runner") for p in alive]
        raise CheckFailed(f"after close, these run {subject.ends_s:g} s later: {', '.join(sorted(names))}")
