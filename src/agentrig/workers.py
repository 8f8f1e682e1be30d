"""Runner processes: each builds the agent once and runs rollouts on it; a stuck one can be killed.

Nothing here knows Agent Lightning: `runtime` feeds a pool from the store and files what comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import multiprocessing
import os
import pickle
import queue
import re
import signal
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import attrs

from agentrig.agents import Agent, Endpoint, Outcome, without_proxy
from agentrig.confine import BASE, confine, declared, hint, withheld
from agentrig.ends import SIGNALS
from agentrig.errors import AgentFailure, AgentrigError, place_of
from agentrig.families import MARK, end_families, lead
from agentrig.forks import SAFE_PATH_KEPT, start_process
from agentrig.pools import BasePool, Worker
from agentrig.text import cut, storable, words_of
from agentrig.traces import Trace

log = logging.getLogger(__name__)

CLIENTS = ("openai", "anthropic", "httpx", "httpx2", "httpcore", "httpcore2")
"""Packages whose exceptions mean that a call to the model failed."""

KIND = re.compile(r"[A-Za-z0-9_.-]{1,40}")
"""What a failure's kind looks like: the name of a row in tables and of a key in `summary.json`."""

ANSWER_LIMIT = 10_000_000
"""Longest answer, in characters of JSON."""

PRELOAD = (
    "agentrig.workers", "agentrig.recording", "agentrig.plugins", "agentrig.config", "cattrs", "httpx",
    "langchain_core.callbacks.base", "langchain_core.tracers.context",
)  # fmt: skip
"""What every runner imports; those that are not installed are passed over."""


@attrs.frozen(kw_only=True)
class AgentPlan:
    """How a runner process gets its agent: by name, so that nothing but plain values crosses over.

    Attributes:
        name: The agent's.
        config: Its settings.
        files: Plugin files to load.
        block: Plugins not to load.
        environment: Names or patterns of the variables that the agent gets beside `agentrig.confine.BASE`.
    """

    name: str
    config: Mapping[str, Any]
    files: Sequence[str] = ()
    block: Sequence[str] = ()
    environment: Sequence[str] = ()

    def build(self) -> Agent:
        """Load the plugins and build the agent.

        Raises:
            agentrig.errors.AgentrigError: It cannot be built; the message names the plugin's file and line.
        """
        from agentrig.building import built
        from agentrig.config import structure
        from agentrig.plugins import load

        component = load(files=self.files, block=self.block).find("agent", self.name)
        config: Any = structure(component.spec.config, self.config, owner=self.name, section="agent")
        agent: Agent = built(component, config)
        return agent


@attrs.frozen(kw_only=True)
class Job:
    """One rollout to run; `input` is all that a runner learns of the task."""

    id: str
    input: Mapping[str, Any]
    endpoint: Endpoint

    def failed(self, kind: str, message: str, started: float) -> Result:
        """Return the result of a job that its runner could not end; `started` is of the monotonic clock."""
        duration = time.monotonic() - started
        return Result(
            id=self.id,
            outcome=Outcome(failure=kind, message=message),
            trace=Trace(rollout_id=self.id),
            start=time.time() - duration,
            duration_s=duration,
        )


@attrs.frozen(kw_only=True)
class Result:
    """What became of a job. `start` is Unix time, `duration_s` the agent's wall time."""

    id: str
    outcome: Outcome
    trace: Trace
    start: float
    duration_s: float


def run_agent(agent: Agent, job: Job, loop: asyncio.AbstractEventLoop | None = None) -> Result:
    """Run one rollout in this thread; failures come back typed.

    Args:
        agent: What `AgentSpec.build` returned.
        job: The rollout.
        loop: What `running_loop` returned, for an `async` agent: all its rollouts in a process share
            one, for a client that it keeps is bound to the loop of its first call. None for a loop of its own.
    """
    from agentrig.recording import recording

    without_proxy(job.endpoint.base_url)
    start, clock = time.time(), time.perf_counter()
    muted = bool(getattr(agent, "records_itself", False))
    endpoint = job.endpoint
    with recording(job.id, token_ids=endpoint.token_ids, muted=muted, base_url=endpoint.base_url) as recorder:
        try:
            answer = agent(job.input, job.endpoint)
            if inspect.isawaitable(answer):
                waiting = _await(answer)
                answer = asyncio.run_coroutine_threadsafe(waiting, loop).result() if loop else asyncio.run(waiting)
            outcome = Outcome(answer=json_values(answer))
        except BaseException as error:  # CancelledError and its like too: in this thread nobody else would take them
            outcome = _failed(error)
            recorder.fail(outcome.message)
    return Result(
        id=job.id, outcome=outcome, trace=recorder.trace(), start=start, duration_s=time.perf_counter() - clock
    )


def _failed(error: BaseException) -> Outcome:
    """Return the outcome of a rollout whose agent let an exception out."""
    kind = failure_kind(error)
    message = words_of(error)
    if not KIND.fullmatch(kind):
        named = f"(its kind {cut(storable(kind), 60)!r} is no short name: letters, digits, -, _ and ., at most 40)"
        kind, message = "agent-error", f"{message} {named}"
    place = place_of(error) if kind == "agent-error" else ""
    return Outcome(failure=kind, message=message + place + hint(message))


def json_values(answer: Any) -> Any:
    """Return an answer as the JSON values that the reward gets; lone surrogates become U+FFFD.

    Raises:
        AgentFailure: It is something else, too long, or nested too deep to leave the process; of the kind `bad-answer`.
    """
    try:
        text = json.dumps(answer)
        if len(text) > ANSWER_LIMIT:
            raise ValueError(f"it has {len(text)} characters of JSON, {ANSWER_LIMIT} are allowed")
        values = json.loads(text)
        if "\\ud" in text:  # an escape that may be half of a pair
            values = json.loads(storable(json.dumps(values, ensure_ascii=False)))
        pickle.dumps(values)
    except Exception as error:  # a dict's or list's own methods may raise anything
        raise AgentFailure(
            f"the agent answered with {type(answer).__name__}: {words_of(error)}; return text, numbers, lists or dicts",
            kind="bad-answer",
        ) from None
    return values


def packed(agent: Agent, job: Job, loop: asyncio.AbstractEventLoop | None = None) -> bytes:
    """Run a rollout and return its pickled `Result`; never raises, so that no rollout waits for its deadline."""
    started = time.monotonic()
    try:
        return pickle.dumps(run_agent(agent, job, loop))
    except BaseException as error:
        message = f"what the rollout recorded cannot leave its process: {words_of(error)}"
        return pickle.dumps(job.failed("agent-error", message, started))


def running_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop that runs in a thread of its own, for `run_agent`."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="loop", daemon=True).start()
    return loop


async def _await(awaitable: Any) -> Any:
    try:
        return await awaitable
    except SystemExit as error:  # let out, it would end the loop of all rollouts
        raise AgentFailure(f"the agent called sys.exit({error.code!r})") from error


def failure_kind(error: BaseException) -> str:
    """Return the failure kind of an exception that an agent let out."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        if isinstance(current, AgentFailure):
            return str(current.kind)
        if type(current).__module__.split(".")[0] in CLIENTS:
            return "llm-error"
        seen.add(id(current))
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return "agent-error"


def worker_main(
    pipe: Connection, plan: AgentPlan, threads: int, environment: Mapping[str, str], absent: Sequence[str]
) -> None:
    """Run in a runner process: build the agent, then run what comes through the pipe, until it closes."""
    from agentrig.recording import install

    own_family()
    threading.Thread(target=_leave_with_run, name="run", daemon=True).start()
    confine(plan.environment, environment, absent)
    try:
        install()  # now, so that no rollout's deadline pays for its imports
        agent = plan.build()
    except BaseException as error:
        own = isinstance(error, AgentrigError)
        text = storable(str(error)) if own else f"no runner can start: {words_of(error)}"
        pipe.send(("failed", text + hint(text)))
        leave_no_family()
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
    leave_no_family()  # threads may hang in the agent; nothing of value is left in this process


def own_family() -> None:
    """Make this process the head of all that its agent will start, and leave signals to the run, which ends it."""
    lead()
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)  # not ignored: what the agent starts would ignore them too
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    if os.environ.pop(SAFE_PATH_KEPT, None) is None:
        os.environ.pop("PYTHONSAFEPATH", None)  # it was for the start of this process


def _leave_with_run() -> None:
    """End this process with the run's, also while it builds the agent."""
    run = multiprocessing.parent_process()
    assert run is not None
    run.join()
    leave_no_family()


def leave_no_family() -> NoReturn:
    """End this process and what its agent has started."""
    end_families([os.getpid()], [os.environ.get(MARK, "")])
    os._exit(0)


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
        environment: Set in the runners before the agent is built, beside what `plan` lets through.
    """

    def __init__(
        self,
        plan: AgentPlan,
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
        """End all runners and what they have started; what they were doing is lost."""
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
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.process.pid, signal.SIGSTOP)  # what it starts no more need not be looked for
        end_families([w.process.pid for w in workers], [w.mark for w in workers])
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
        """Bury a process that ended, with its exit code."""
        worker.process.join()
        worker.pipe.close()
        end_families([worker.process.pid], [worker.mark])
        code = f"(exit code {worker.process.exitcode})"
        failed = self._bury(
            worker,
            early=f" {code}; run `agentrig dev` with runners.n=1 to see why",
            died=lambda times: f"the runner process died {code}, {times} times",
        )
        again = len(worker.jobs) - len(failed)
        log.warning("%s died %s; %d rollouts start again, %d failed", worker.title, code, again, len(failed))
        return failed
