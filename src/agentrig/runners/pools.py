"""The bookkeeping of a pool of runners; subclasses define what a runner is, such as a process or a Ray actor."""

from __future__ import annotations

import abc
import logging
import re
import resource
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

import attrs

from agentrig.errors import AgentrigError
from agentrig.runners.loops import BLOCKED, blocked_words
from agentrig.text import amount

if TYPE_CHECKING:
    from agentrig.pools import AgentSource, Job, Result

SPAWN_LIMIT = 3
"""How many runners in a row may die before they have built the agent."""

READY_S = 300.0
"""Seconds that a runner may take to start and to build its agent."""

ANSWER_S = 5.0
"""Seconds that the interpreter of a runner with a late rollout has to answer; a busy machine needs some."""

HELD = (
    "; native code of one of its rollouts, or a regular expression, held Python's interpreter, so nothing else in that "
    "runner could go on. Give that code a limit of its own, start it by subprocess, or set runners.threads=1"
)
"""Added to the message of a late rollout whose runner did not answer."""

BLOCKED_S = 3.0
"""Seconds in which a runner says again that its event loop is blocked, if it still is."""

BLOCKS_TOLD = 3
"""So many functions that block an event loop are told of."""

SLOW_S = 15.0
"""Seconds after which it is said that the agent is still being built."""

_told_slow: set[tuple[str, str]] = set()  # what this process has said it of
_told_blocked: set[str] = set()  # functions that it has said to block a loop

FILES = 256
"""Files that a process of a run must be allowed to open; the run of recipe `mini` needs between 128 and 200."""


def check_machine() -> None:
    """Raise `AgentrigError` if runners and a model's server cannot work here: too few open files, or no loopback."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= files < FILES:
        raise AgentrigError(
            f"this process may open {files} files at once (ulimit -n), and a run needs {FILES}.\n"
            "  Allow more and start again: ulimit -n 4096 (in a new shell, if this one may not)"
        )
    try:
        with socket.create_server(("127.0.0.1", 0)) as here:
            socket.create_connection(here.getsockname(), timeout=5).close()
    except OSError as error:
        raise AgentrigError(
            f"this process cannot connect to 127.0.0.1 ({error.strerror or error}), and a run's processes reach each "
            "other there.\n  Enable the loopback interface: ip link set lo up"
        ) from error


@attrs.define(eq=False, kw_only=True)
class Worker:
    """A runner.

    Attributes:
        title: Its name in log lines.
        ready: Whether it has built its agent.
        asked: When it was asked to answer, because a rollout is late; 0 if it was not.
        answers: Whether it has answered since.
        given: How many jobs it has been given since it started.
        blocked: When the event loop of its async rollouts was last seen to be blocked, and where.
    """

    title: str
    ready: bool = False
    asked: float = 0.0
    answers: bool = False
    created: float = attrs.field(factory=time.monotonic)
    jobs: dict[str, tuple[Job, float]] = attrs.field(factory=dict)
    given: int = 0
    blocked: tuple[float, str] = (0.0, "")


W = TypeVar("W", bound=Worker)


def counted(times: int) -> str:
    """Return `, 2 times` for what has happened more than once, else ''."""
    return f", {times} times" if times > 1 else ""


class BasePool(abc.ABC, Generic[W]):
    """Runners with a job queue; used from one thread, except `submit` and `wake`.

    A subclass defines how its runners are started, given a job, waited for and killed.

    Args:
        threads: Concurrent rollouts in each runner.
        deadline_s: Time limit of a rollout in seconds. If a rollout exceeds it, its runner is killed and the
            rollout fails with `deadline`; the other rollouts of that runner are restarted.
        retries: How often a rollout is restarted when its runner died; after that it fails with `runner-died`.

    Attributes:
        replaced: How many runners were replaced.
        built: Set once a runner has built the agent.
        builds: What its runners build, for messages.
        runs: What its runners are called in messages: one, and several of them.
        process: What the process of a runner is called in the message of a rollout.
        title: What a runner is called in log lines, before its process id.
        cure: How to see why one dies, or hangs, before it has built that.
    """

    builds = "agent"
    runs = ("runner", "runners")
    process = "the runner process"
    title = "runner"
    cure = "run `agentrig dev` with runners.n=1"

    def __init__(self, plan: AgentSource, *, n: int, threads: int, deadline_s: float, retries: int) -> None:
        check_machine()
        self._plan, self.n, self._threads = plan, n, threads
        self.deadline_s, self.retries = deadline_s, retries
        self._workers: list[W] = []
        self._waiting: deque[Job] = deque()
        self._lost: dict[str, int] = {}
        self._died_early = 0
        self.replaced = 0
        self.built = threading.Event()

    @abc.abstractmethod
    def wake(self) -> None:
        """Make a `poll` that waits in another thread return."""

    @abc.abstractmethod
    def _spawn(self) -> W:
        """Start a runner."""

    @abc.abstractmethod
    def _send(self, worker: W, job: Job) -> bool:
        """Send a job to a runner; False if the runner is dead, which `_listen` then handles."""

    @abc.abstractmethod
    def _listen(self, timeout_s: float) -> list[Result]:
        """Wait for events, pass them to `_built`, `_ended` and `_remove_dead`, and return their results."""

    @abc.abstractmethod
    def _kill(self, worker: W) -> None:
        """End a runner, and release its resources."""

    def _ask(self, worker: W) -> None:
        """Ask a runner to answer, so that a held interpreter can be told from a slow agent."""
        worker.answers = True

    def _holds(self, worker: W, now: float) -> bool | None:
        """Whether code in a runner holds its interpreter; None while it may still answer."""
        if not worker.asked:
            worker.asked, worker.answers = now, False
            self._ask(worker)
        if worker.answers:
            return False
        return True if now - worker.asked > ANSWER_S else None

    def _stopped(self, worker: W) -> bool:
        """Whether a signal has stopped a runner, so that none of its rollouts could go on."""
        return False

    def _beside(self, worker: W) -> bool:
        """Whether another job than one that is late may hold a runner's interpreter, or may have held it."""
        return len(worker.jobs) > 1

    def start(self) -> None:
        """Start the missing runners; they build the agent in the background."""
        while len(self._workers) < self.n:
            self._workers.append(self._spawn())

    def build_first(self, timeout_s: float) -> bool:
        """Start one runner and wait until it has built the agent; see `agentrig.pools.RunnerPool`."""
        if not self._workers:
            self._workers.append(self._spawn())
        end = time.monotonic() + timeout_s
        while not any(w.ready for w in self._workers) and (left := end - time.monotonic()) > 0:
            self._listen(min(left, SLOW_S))
            self._tell_slow(time.monotonic())
            if not self._workers:  # it died, but may work the next time
                self._workers.append(self._spawn())
        return any(w.ready for w in self._workers)

    @property
    def room(self) -> int:
        """How many more jobs could start now; the queue should not become much longer than this."""
        return self.n * self._threads - self.pending

    @property
    def pending(self) -> int:
        """Number of jobs that were submitted and are not finished."""
        return sum(len(w.jobs) for w in self._workers) + len(self._waiting)

    def submit(self, job: Job) -> None:
        """Queue a job."""
        self._waiting.append(job)

    def processes(self) -> list[int]:
        """Return the process ids of runners on this machine."""
        return []

    def poll(self, timeout_s: float) -> list[Result]:
        """Send jobs to runners, wait for events, and return the finished results."""
        self._dispatch()
        results = self._listen(timeout_s)
        results += self._enforce_deadlines()
        self.start()
        self._dispatch()
        return results

    def close(self) -> None:
        """End all runners; their current rollouts are lost."""
        for worker in self._workers:
            self._kill(worker)
        self._workers.clear()
        self._waiting.clear()

    def _dispatch(self) -> None:
        able = [w for w in self._workers if w.ready]
        while self._waiting:
            fit = [w for w in able if self._fits(w, self._waiting[0])]
            if not fit:
                return
            worker = min(fit, key=lambda w: len(w.jobs))
            job = self._waiting.popleft()
            if self._send(worker, job):
                worker.jobs[job.id] = (job, time.monotonic())
                worker.given += 1
            else:
                self._waiting.appendleft(job)
                able.remove(worker)

    def _fits(self, worker: W, job: Job) -> bool:
        """Whether a ready runner may take a job now.

        A job whose runner died runs alone the next time, so that it can't end other jobs.
        """
        limit = 1 if job.id in self._lost else self._threads
        return len(worker.jobs) < limit and not self._lost.keys() & worker.jobs.keys()

    def _built(self, worker: W) -> None:
        """Mark a runner as ready: it has built its agent."""
        worker.ready = True
        self._died_early = 0
        self.built.set()

    def _ended(self, worker: W, result: Result) -> list[Result]:
        """Store a result and return it, unless its job has already failed."""
        if worker.jobs.pop(result.id, None) is None:
            return []
        self._lost.pop(result.id, None)
        return [result]

    def _remove_dead(self, worker: W, early: str, died: str, why: str = "") -> list[Result]:
        """Remove a runner that died; restart its rollouts, or return them as failures if they have no retries left.

        Args:
            early: Added to the error if too many runners died before they had built the agent.
            died: Begins the failure's message, before the number of times that a rollout was lost.
            why: Ends it.
        """
        self._workers.remove(worker)
        self.replaced += 1
        if not worker.ready:
            self._died_early += 1
            if self._died_early >= SPAWN_LIMIT:
                raise AgentrigError(
                    f"{self.runs[1]} of {self.builds} {self._plan.name} die before they have built it{early}"
                )
        failed, beside = [], len(worker.jobs) - 1
        suspects = f"; {beside + 1} rollouts were under way in it, and which of them did it is not known"
        for job, started in worker.jobs.values():
            if times := self._lose(worker, job):
                said = f"{died}{counted(times)}{why}{suspects if beside else ''}"
                failed.append(job.failed("runner-died", said, started))
        return failed

    def _remove_late(self, worker: W, overdue: Sequence[str], held: bool) -> list[Result]:
        """Remove a runner that was killed because of late rollouts: these have failed, and its others start again."""
        self._workers.remove(worker)
        self.replaced += 1
        logging.getLogger(type(self).__module__).warning(
            "%s", self._late_words(worker, [worker.jobs[job_id][0] for job_id in overdue])
        )
        failed = []
        seen, place = worker.blocked
        for job_id in overdue:
            job, started = worker.jobs.pop(job_id)
            if self._lose(worker, job, late=True):
                blocked = blocked_words(place) if place and seen >= started else ""
                failed.append(job.failed("deadline", self._deadline_words(held) + blocked, started))
        self._waiting.extendleft(job.again() for job, _ in worker.jobs.values())  # not their fault: not lost
        return failed

    def _lose(self, worker: W, job: Job, *, late: bool = False) -> int:
        """Queue a job again that a runner has lost; return how often it was lost if it fails instead, else 0.

        Args:
            late: Whether it ran past its deadline.
        """
        self._lost[job.id] = self._lost.get(job.id, 0) + 1
        if not self._runs_again(worker, job, late=late):
            return self._lost.pop(job.id)
        self._waiting.appendleft(job.again())
        return 0

    def _runs_again(self, worker: W, job: Job, *, late: bool) -> bool:
        """Whether a job that a runner has lost, see `_lose`, is run once more."""
        return not late and self._lost[job.id] <= self.retries

    def _late_words(self, worker: W, jobs: Sequence[Job]) -> str:
        """Say that a runner is killed, because these jobs of it ran too long."""
        late = "1 rollout past its deadline" if len(jobs) == 1 else f"{len(jobs)} rollouts past their deadline"
        return f"{worker.title} killed: {late}"

    def _limit_s(self, job: Job) -> float:
        """Return the seconds that a job may take."""
        return self.deadline_s

    def _deadline_words(self, held: bool) -> str:
        """Say what has become of a job that ran too long, and perhaps `held` its runner's interpreter."""
        limit = f"{self.deadline_s:g} s (runners.deadline_s)"
        return f"the rollout ran past its deadline of {limit} and its runner was killed{HELD if held else ''}"

    def _not_built(self) -> str:
        """Say why a runner may not have built its agent within `READY_S`."""
        return (
            f"the {self.builds} {self._plan.name} has not been built after {READY_S:g} s: its {self.runs[0]} hangs; "
            f"{self.cure} to see where"
        )

    def _blocks(self, worker: W, place: str) -> None:
        """Note where code of the agent blocks the event loop of a runner; say so once of a function, for all pools."""
        worker.blocked = (time.monotonic(), place)
        function = re.sub(r":\d+ ", " ", place)
        if function not in _told_blocked and len(_told_blocked) < BLOCKS_TOLD:
            _told_blocked.add(function)
            logging.getLogger(type(self).__module__).warning(
                "the %s %s blocks the event loop at %s, %s", self.builds, self._plan.name, place, BLOCKED
            )

    def _check_built(self, now: float) -> None:
        """Raise `AgentrigError` if a runner takes too long to build its agent."""
        self._tell_slow(now)
        if any(not w.ready and now - w.created > READY_S for w in self._workers):
            raise AgentrigError(self._not_built())

    def _tell_slow(self, now: float) -> None:
        """Say what is waited for if no runner has built the agent for a while; once, also of several pools."""
        told = (self.builds, self._plan.name) in _told_slow
        if not (told or self.built.is_set()) and any(now - w.created > SLOW_S for w in self._workers):
            _told_slow.add((self.builds, self._plan.name))
            logging.getLogger(type(self).__module__).info(
                "the %s %s is still being built after %g s: waiting for its imports and its `build`, at most %g s",
                *(self.builds, self._plan.name, SLOW_S, READY_S),
            )

    def _enforce_deadlines(self) -> list[Result]:
        failed = []
        log = logging.getLogger(type(self).__module__)
        now = time.monotonic()
        self._check_built(now)
        for worker in list(self._workers):
            overdue = [i for i, (job, started) in worker.jobs.items() if now - started > self._limit_s(job)]
            if not overdue:
                worker.asked = 0.0
                continue
            stopped = "was stopped by a signal" if self._stopped(worker) else ""
            held = not stopped and self._holds(worker, now)
            if held is None:
                continue
            if held and self._beside(worker):
                stopped = "could run nothing, because native code kept Python's interpreter"
            seen, place = worker.blocked
            if not stopped and now - seen < BLOCKED_S and self._beside(worker):
                stopped = f"could run nothing, because {place} blocked its event loop"
            self._kill(worker)
            if stopped:  # by one of them, which cannot be known: each is lost, and starts again alone
                failed += self._remove_dead(worker, "", f"{self.process} {stopped}")
                rollouts = amount(len(worker.jobs), "rollout")
                log.warning("%s with %s is killed: it %s", worker.title, rollouts, stopped)
                continue
            failed += self._remove_late(worker, overdue, bool(held))
        return failed
