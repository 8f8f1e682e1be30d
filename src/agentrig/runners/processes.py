"""Runner processes: each builds the agent once and runs rollouts on it; a stuck one can be killed.

This module does not use Agent Lightning: `runtime` moves rollouts from the store to a pool, and results back.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import multiprocessing
import os
import pickle
import queue
import signal
import threading
import uuid
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import attrs

from agentrig.errors import AgentrigError
from agentrig.pools import AgentSource, Job, Result
from agentrig.processes.confine import BASE, confine, declared, withheld
from agentrig.processes.ends import SIGNALS
from agentrig.processes.families import MARK, end_families, end_own_family, end_stopped, lead
from agentrig.processes.forks import SAFE_PATH_KEPT, start_process
from agentrig.runners.attempt import build_agent, packed, running_loop
from agentrig.runners.pools import BasePool, Worker

log = logging.getLogger(__name__)

PRELOAD = (
    "agentrig.processes.forkserver",
    "agentrig.runners.processes",
    "agentrig.tracing.recording",
    "agentrig.plugins.registry",
    "agentrig.plan",
    "cattrs",
    "httpx",
    "langchain_core.callbacks.base",
    "langchain_core.tracers.context",
)
"""Modules that every runner imports, and how the process that forks them ends; missing ones are skipped."""


def worker_main(
    pipe: Connection, plan: AgentSource, threads: int, environment: Mapping[str, str], absent: Sequence[str]
) -> None:
    """Run in a runner process: build the agent, then run the jobs from the pipe until it closes."""
    own_family()
    faulthandler.enable(all_threads=False)  # the file and line at which an agent crashes this process
    threading.Thread(target=_leave_with_run, name="run", daemon=True).start()
    confine(plan.environment, environment, absent)
    agent, why = build_agent(plan)
    if agent is None:
        pipe.send(("failed", why))
        leave_no_family()
    gc.collect()
    gc.freeze()  # what the agent has built stays: it is not searched for cycles again
    pipe.send(("ready", os.getpid()))
    jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
    lock = threading.Lock()

    loop = running_loop()

    def serve() -> None:
        while (job := jobs.get()) is not None:
            result = packed(agent, job, loop)
            with lock:
                pipe.send(("result", result))

    for i in range(threads):
        threading.Thread(target=serve, name=f"rollout-{i}", daemon=True).start()
    while True:
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            break
        if message is None:
            break
        jobs.put(message)
    leave_no_family()  # threads may hang in the agent; this process has nothing left to save


def ender_main(pipe: Connection, leaders: Sequence[int], marks: Sequence[str]) -> None:
    """Run in a process of its own: end runners. It goes on if the run is killed meanwhile, else they stay stopped."""
    lead()
    end_stopped(leaders, marks)


def own_family() -> None:
    """Make this process the leader of all processes that its agent starts, and ignore signals; the run ends it."""
    lead()
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)  # not SIG_IGN: processes that the agent starts would inherit it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    if os.environ.pop(SAFE_PATH_KEPT, None) is None:
        os.environ.pop("PYTHONSAFEPATH", None)  # it was set only for the start of this process


def _leave_with_run() -> None:
    """End this process when the run's process ends, even while it builds the agent."""
    run = multiprocessing.parent_process()
    assert run is not None
    run.join()
    leave_no_family()


def leave_no_family() -> NoReturn:
    """End this process and the processes that its agent has started."""
    end_own_family([os.environ.get(MARK, "")])


@attrs.define(eq=False)
class _Worker(Worker):
    process: Any
    pipe: Connection
    mark: str


class Pool(BasePool[_Worker]):
    """Runner processes with a queue in front.

    Args:
        plan: The agent; like the limits, as in `BasePool`.
        n: Processes.
        preload: Modules to import once, in the process that the runners are forked from.
        environment: Variables to set in the runners before the agent is built, in addition to those of `plan`.
    """

    def __init__(
        self,
        plan: AgentSource,
        *,
        n: int,
        threads: int,
        deadline_s: float,
        retries: int,
        preload: Iterable[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(plan, n=n, threads=threads, deadline_s=deadline_s, retries=retries)
        self._environment = {
            **declared((*BASE, *plan.environment)),
            "OMP_NUM_THREADS": "1",
            "LANGSMITH_TRACING": "false",
            **(environment or {}),
        }
        self._absent = withheld(plan.environment)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*PRELOAD, *preload])
        self._wake_out, self._wake_in = self._context.Pipe(duplex=False)
        self._wake_lock = threading.Lock()

    def wake(self) -> None:
        """Make a `poll` that waits in another thread return."""
        with self._wake_lock:
            if not self._wake_out.poll():
                self._wake_in.send(None)

    def processes(self) -> list[int]:
        """Return the process ids of the runners."""
        return [w.process.pid for w in self._workers]

    def close(self) -> None:
        """End all runners and the processes that they have started; their current rollouts are lost."""
        self._end(self._workers)
        self._workers.clear()
        super().close()

    def _spawn(self) -> _Worker:
        mark = uuid.uuid4().hex
        environment = {**self._environment, MARK: mark}
        ours, process = start_process(self._context, worker_main, self._plan, self._threads, environment, self._absent)
        return _Worker(process, ours, mark, title=f"runner {process.pid}")

    def _kill(self, worker: _Worker) -> None:
        self._end([worker])

    def _end(self, workers: Sequence[_Worker]) -> None:
        if not workers:
            return
        leaders, marks = [w.process.pid for w in workers], [w.mark for w in workers]
        try:
            pipe, ender = start_process(self._context, ender_main, leaders, marks)
        except AgentrigError:  # no process can be started
            end_stopped(leaders, marks)
        else:
            ender.join()
            pipe.close()
        for worker in workers:
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()

    def _send(self, worker: _Worker, job: Job) -> bool:
        try:
            worker.pipe.send(job)
        except OSError:
            return False  # it is dead; its sentinel brings it to _died
        return True

    def _listen(self, timeout_s: float) -> list[Result]:
        sources: list[Any] = [self._wake_out]
        for worker in self._workers:
            sources += [worker.pipe, worker.process.sentinel]
        ready = set(wait(sources, timeout=timeout_s))
        if self._wake_out in ready:
            self._wake_out.recv()
        results: list[Result] = []
        for worker in list(self._workers):
            if worker.pipe in ready:
                results += self._receive(worker)
            if worker.process.sentinel in ready:
                results += self._receive(worker) + self._died(worker)
        return results

    def _receive(self, worker: _Worker) -> list[Result]:
        results = []
        try:
            while worker.pipe.poll():
                what, value = worker.pipe.recv()
                if what == "ready":
                    self._built(worker)
                elif what == "failed":
                    raise AgentrigError(value)
                else:
                    results += self._ended(worker, pickle.loads(value))
        except (EOFError, OSError):
            pass  # the process is gone; its sentinel brings it to _died
        return results

    def _died(self, worker: _Worker) -> list[Result]:
        """Remove a process that ended, and log its exit code."""
        worker.process.join()
        worker.pipe.close()
        end_families([worker.process.pid], [worker.mark])
        code = f"(exit code {worker.process.exitcode})"
        failed = self._remove_dead(
            worker,
            early=f" {code}; run `agentrig dev` with runners.n=1 to see why",
            died=lambda times: f"the runner process died {code}, {times} times",
        )
        again = len(worker.jobs) - len(failed)
        log.warning("%s died %s; %d rollouts start again, %d failed", worker.title, code, again, len(failed))
        return failed
