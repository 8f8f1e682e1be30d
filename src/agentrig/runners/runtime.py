"""The runtime of a run: jobs go to the pool and come back as results, while the algorithm runs beside it."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import attrs

from agentrig.errors import AgentrigError, place_of
from agentrig.pools import Job, Result, RunnerPool
from agentrig.text import words_of

if TYPE_CHECKING:
    from agentrig.gateway.process import Gateway
    from agentrig.processes.ends import Interrupted

WAKE_S = 0.2
"""Seconds after which the waiting main thread handles a signal that did not wake it: another thread may have taken it,
as after SIGSTOP."""

POLL_S = 0.2
"""Seconds that the pool waits for an event; a new job, or the end of the run, wakes it before."""

UNWIND_S = 5.0
"""Seconds that the body of an aborted run may take to shut down its server and other resources."""

AT_ONCE_S = 0.5
"""As `UNWIND_S`, after the second signal."""

STOP_S = 5.0
"""Seconds that a pool may take to return from `poll` at the run's end; then it is closed all the same."""

Results = queue.SimpleQueue["Result | Exception"]
"""Where somebody waits for results; an exception means that no more come."""


class Runtime:
    """Runs the pool in a thread and the algorithm in another one.

    The main thread only waits, so that it can handle signals. A thread that hangs, for example in a server's start or
    in an update, does not stop the run from ending: it is left behind.

    Args:
        pool: Runs the agent; started and closed here.
        gateway: The run's gateway; None if agents call the model's server themselves. It has the calls of a rollout
            whose runner was killed.

    Attributes:
        broken: Why the pool runs no more jobs; None while it does.
    """

    def __init__(self, pool: RunnerPool, gateway: Gateway | None = None) -> None:
        self.pool = pool
        self.gateway = gateway
        self._jobs: deque[Job] = deque()
        self._waiting: dict[str, Results] = {}
        # Its `put` is safe in a signal handler, which may interrupt `run` anywhere; that of an Event is not.
        self._over: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._running = self._stopping = False
        self._no_more: Exception | None = None
        self.broken: AgentrigError | None = None
        self._aborted: AgentrigError | Interrupted | None = None

    @property
    def warnings(self) -> Sequence[str]:
        """What the run's summary says of its runners."""
        return getattr(self.pool, "warnings", ())

    def run(self, body: Callable[[], None]) -> None:
        """Start the runners and call `body` in threads, then shut everything down; raises what `body` raised."""
        raised: list[BaseException] = []

        def guarded() -> None:
            try:
                body()
            except BaseException as error:
                raised.append(error)
            finally:
                self._over.put(None)

        algorithm = threading.Thread(target=guarded, name="algorithm", daemon=True)
        runners = threading.Thread(target=self._serve, name="runners", daemon=True)
        try:
            self._running = True
            if self._aborted is None:
                runners.start()
                algorithm.start()
                while True:
                    with suppress(queue.Empty):
                        self._over.get(timeout=WAKE_S)
                        break
        except KeyboardInterrupt as error:
            self._say_unbuilt(error)
            raise
        finally:
            self._running, self._stopping = False, True
            if runners.is_alive():
                self.pool.wake()
                runners.join(STOP_S)
            self.pool.close()
        if self._aborted is not None:
            if isinstance(self._aborted, KeyboardInterrupt):
                self._say_unbuilt(self._aborted)
            if algorithm.is_alive():
                algorithm.join(AT_ONCE_S if getattr(self._aborted, "at_once", False) else UNWIND_S)
            self._aborted.abandoned = algorithm.is_alive()
            raise self._aborted
        if self.broken is not None and not raised:
            algorithm.join(UNWIND_S)
        if raised:
            raise raised[0]
        if self.broken is not None:
            raise self.broken

    def _say_unbuilt(self, error: KeyboardInterrupt) -> None:
        """Add to the message of a signal that the agent was being built, if it was."""
        if self.pool.n and not self.pool.built.is_set():
            error.args = (f"{error}, which waited for the agent to be built",)

    def abort(self, error: AgentrigError | Interrupted) -> None:
        """Make `run` end immediately and raise that error. Safe in a signal handler and in any thread."""
        self._aborted = error
        self.end_results(AgentrigError("the run was interrupted"))
        if not self._running:
            raise error
        self._over.put(None)

    def check(self) -> None:
        """Raise if the run was aborted; what its body has done stays unsaved."""
        if self._aborted is not None and self._no_more is not None:
            raise self._no_more

    def end_results(self, error: Exception) -> None:
        """Give that error to everybody who waits for results, now or later."""
        self._no_more = error
        for results in {id(each): each for each in list(self._waiting.values())}.values():
            results.put(error)

    def wait_for_agent(self) -> None:
        """Wait until a runner has built the agent; the pool has its own time limit."""
        while self.pool.n and not self.pool.built.wait(0.05):
            if self._no_more is not None:
                raise self._no_more

    def submit(self, jobs: Sequence[Job], results: Results) -> None:
        """Queue jobs; each one's result is put into `results`, in the order in which they finish."""
        for job in jobs:
            self._waiting[job.id] = results
        if self.gateway is not None:
            address = self.gateway.address
            jobs = [attrs.evolve(job, endpoint=attrs.evolve(job.endpoint, gateway=address)) for job in jobs]
        self._jobs.extend(jobs)
        if self._no_more is not None:
            results.put(self._no_more)
        self.pool.wake()

    def _serve(self) -> None:
        """Keep the pool busy until the run ends, or the pool breaks."""
        try:
            try:
                self.pool.start()  # it may wait for modules that all runners share
            except BaseException:
                self._over.put(None)  # the algorithm may wait for what the pool should have served
                raise
            while not self._stopping:
                for _ in range(min(self.pool.room, len(self._jobs))):
                    self.pool.submit(self._jobs.popleft())
                for result in self.pool.poll(POLL_S):
                    self._hand_over(result)
        except AgentrigError as error:
            self._break(error)
        except (Exception, SystemExit) as error:
            broken = AgentrigError(f"the run's runners failed: {words_of(error)}{place_of(error)}")
            broken.__cause__ = error
            self._break(broken)

    def _hand_over(self, result: Result) -> None:
        if self.gateway is not None and result.outcome.failure is not None and not result.trace.spans:
            result = attrs.evolve(result, trace=self.gateway.left(result.id) or result.trace)
        results = self._waiting.pop(result.id, None)
        if results is not None:
            results.put(result)

    def _break(self, error: AgentrigError) -> None:
        self.broken = error
        self.end_results(error)
