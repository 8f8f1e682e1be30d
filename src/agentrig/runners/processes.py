"""Runner processes: each builds the agent once and runs rollouts on it; a stuck one can be killed.

`runtime` passes them jobs, and hands out results.
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
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn
from urllib.parse import quote, unquote

import attrs
import psutil

from agentrig.errors import AgentrigError, exhausted
from agentrig.pools import RESULT_BYTES, AgentSource, Job, Result
from agentrig.processes.confine import BASE, ConfinedName, declared, withheld
from agentrig.processes.ends import SIGNALS, ending
from agentrig.processes.families import MARK, end_families, guard
from agentrig.processes.forks import NO_MAIN_GUARD, SAFE_PATH_KEPT, start_process, start_server
from agentrig.processes.put_back import lasting, note_shared, restored
from agentrig.processes.scratch import remove_left
from agentrig.processes.shared import CURE, InterpreterChanged, SharedByRollouts, SharedByScores
from agentrig.runners.loops import RunnerLoop
from agentrig.runners.pools import BasePool, Worker
from agentrig.text import MESSAGE_LIMIT, cut, storable, words_of

log = logging.getLogger(__name__)

PRELOAD = (
    "agentrig.processes.forkserver",
    "agentrig.runners.processes",
    "agentrig.runners.attempt",
    "agentrig.tracing.recording",
    "agentrig.plugins.builtin",
    "agentrig.plugins.loading",
    "agentrig.plan",
    "asyncio",
    "cattrs",
    "httpx",
    "langchain_core.callbacks.base",
    "langchain_core.tracers.context",
)
"""Modules that every runner imports, and how the process that forks them ends; missing ones are skipped."""

PING = "are you there?"
"""Sent to a runner whose rollouts are late: its main thread answers, unless something holds the interpreter."""

END_S = 10.0
"""How long the guards of runners may take to end them and what their agents started, seconds."""


def worker_main(pipe: Connection, plan: AgentSource, threads: int, who: str) -> None:
    """Run in a runner process: build the agent, then run the jobs from the pipe until it closes."""
    from agentrig.runners.attempt import build_agent, packed  # only runners need it, and it imports much

    guard(who, remove_left)
    ignore_signals()
    faulthandler.enable(all_threads=False)  # the file and line at which an agent crashes this process
    lock, connection = threading.Lock(), os.fstat(pipe.fileno())
    named = f"the {who} {plan.name}"

    def send(*words: bytes) -> None:
        with lock:
            line = memoryview(b" ".join(words) + b"\n")
            try:
                while line:
                    if not os.path.samestat(os.fstat(pipe.fileno()), connection):
                        raise OSError("a file has its number now")
                    try:
                        line = line[os.write(pipe.fileno(), line) :]
                    except BlockingIOError:  # an agent has made it one that does not wait
                        os.set_blocking(pipe.fileno(), True)
            except OSError as error:  # an agent's mistake, or the run has ended
                said = f"agentrig: the {who} has closed the connection to the run, and this process ends ({error})\n"
                with suppress(OSError):
                    os.write(2, said.encode())
                os._exit(1)

    def fail(why: str) -> NoReturn:
        send(b"failed", quote(why, safe="").encode())  # it has several lines
        os._exit(0)

    def end(why: str) -> NoReturn:
        send(b"ending", quote(why, safe="").encode())
        os._exit(1)

    agent, why = build_agent(plan)
    if agent is None:
        fail(why)
    gc.collect()
    gc.freeze()  # what the agent has built stays: it is not searched for cycles again
    rollouts = SharedByRollouts(several=threads > 1) if who == "agent" else None
    note_shared(rollouts or SharedByScores(), named)
    jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()

    def serve() -> None:
        while (job := jobs.get()) is not None:
            try:
                result = packed(agent, job, loop, rollouts)
            except InterpreterChanged as changed:  # by one of those under way: each is lost, and starts again alone
                end(f"a rollout in it {changed}: {CURE}")
            send(b"result", quote(job.id, safe="").encode(), result)
            if done := lasting():
                end(f"{named} {done}, which nothing can undo in its process")

    try:
        loop = RunnerLoop(lambda place: send(b"blocked", quote(place, safe="").encode()))
        for i in range(threads):
            threading.Thread(target=serve, name=f"rollout-{i}", daemon=True).start()
    except RuntimeError as error:  # there is no memory for one
        fail(f"no runner can start: {exhausted(error) or words_of(error)}")
    send(b"ready", str(os.getpid()).encode())
    while True:
        try:
            data = pipe.recv_bytes()
        except BlockingIOError:
            os.set_blocking(pipe.fileno(), True)
            continue
        except (EOFError, OSError):
            break
        try:
            restored()
            message = pickle.loads(data)
        except Exception as error:  # an agent has broken what Python itself needs
            end(f"it cannot read what the run sends ({words_of(error)}): does the {who} change Python's own modules?")
        if message is None:
            break
        if message == PING:
            send(b"alive")
        else:
            jobs.put(message)
    os._exit(0)  # threads may hang in the agent; this process has nothing left to save


def ignore_signals() -> None:
    """Ignore the signals of a terminal or a scheduler: the run ends its runners."""
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)  # not SIG_IGN: processes that the agent starts would inherit it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    if os.environ.pop(SAFE_PATH_KEPT, None) is None:
        os.environ.pop("PYTHONSAFEPATH", None)  # it was set only for the start of this process


@attrs.define(eq=False)
class ProcessWorker(Worker):
    """A runner process, with its guard and this end of its pipe."""

    process: Any
    pipe: Connection
    mark: str
    pid: int = 0
    read: bytearray = attrs.field(factory=bytearray)
    refused: str = ""
    why: str = ""


def not_installed(preload: Iterable[str]) -> list[str]:
    """Return the modules to preload that cannot be found."""
    tops = {module: module.partition(".")[0] for module in preload}
    return [module for module, top in tops.items() if top not in sys.modules and find_spec(top) is None]


class Pool(BasePool[ProcessWorker]):
    """Runner processes with a queue in front.

    Args:
        plan: The agent; like the limits, as in `BasePool`.
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
        modules = [*preload]
        for module in not_installed(modules):
            log.warning("the agent %s has the module %s in its `preload`, and it is not installed", plan.name, module)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*PRELOAD, *modules])
        if n:
            with suppress(OSError):  # a failure is left to `start_process`, which tries again
                start_server()
        self._wake_out, self._wake_in = self._context.Pipe(duplex=False)
        self._wake_lock = threading.Lock()

    def wake(self) -> None:
        """Make a `poll` that waits in another thread return."""
        with self._wake_lock:
            if not self._wake_out.poll():
                self._wake_in.send(None)

    def processes(self) -> list[int]:
        """Return the process ids of the runners; of one that builds its agent, that of its guard."""
        return [w.pid or w.process.pid for w in self._workers]

    def close(self) -> None:
        """End all runners and the processes that they have started; their current rollouts are lost."""
        self._end(self._workers)
        self._workers.clear()
        super().close()

    def _spawn(self) -> ProcessWorker:
        mark = uuid.uuid4().hex
        name = ConfinedName(self._plan.environment, {**self._environment, MARK: mark}, self._absent)
        ours, process = start_process(self._context, worker_main, self._plan, self._threads, self.builds, name=name)
        return ProcessWorker(process, ours, mark, title=f"{self.title} {process.pid}")

    def _kill(self, worker: ProcessWorker) -> None:
        self._end([worker])

    def _end(self, workers: Sequence[ProcessWorker]) -> None:
        for worker in workers:
            worker.process.terminate()  # the guard ends the runner, and does it too if this process is killed now
        limit = time.monotonic() + END_S
        for worker in workers:
            worker.process.join(max(0.0, limit - time.monotonic()))
            if worker.process.exitcode is None:
                log.debug("%s has not ended %g s after it was asked to; its guard is killed", worker.title, END_S)
                worker.process.kill()
                worker.process.join()
                end_families([worker.process.pid], [worker.mark])
            worker.pipe.close()

    def _ask(self, worker: ProcessWorker) -> None:
        with suppress(OSError):  # it is dead
            worker.pipe.send(PING)

    def _stopped(self, worker: ProcessWorker) -> bool:
        try:
            return bool(psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED)
        except psutil.Error:
            return False

    def _send(self, worker: ProcessWorker, job: Job) -> bool:
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

    def _receive(self, worker: ProcessWorker) -> list[Result]:
        """Read what a runner has sent: lines that start with a word. Nothing in them is trusted."""
        results = []
        try:
            while worker.pipe.poll():
                data = os.read(worker.pipe.fileno(), 1 << 20)
                if not data:
                    raise EOFError
                if worker.refused:
                    continue
                first, *lines = data.split(b"\n")
                worker.read += first
                for line in lines:
                    results += self._handle(worker, bytes(worker.read))
                    worker.read = bytearray(line)
                if len(worker.read) > RESULT_BYTES + 1000:
                    raise ValueError(f"more than {RESULT_BYTES / 1e6:.0f} MB in one message")
        except (EOFError, OSError):
            pass  # the process is gone; its sentinel brings it to _died
        except ValueError as error:
            worker.refused = f"sent what no runner sends ({error}), and is ended"
            log.warning("%s %s", worker.title, worker.refused)
            worker.process.terminate()
        return results

    def _handle(self, worker: ProcessWorker, line: bytes) -> list[Result]:
        """Handle a line of a runner."""
        what, _, value = line.partition(b" ")
        if what == b"ready" and value.isdigit() and not worker.ready:
            worker.pid, worker.title = int(value), f"{self.title} {int(value)}"
            self._built(worker)
            return []
        if what == b"failed" and not worker.ready:
            raise AgentrigError(unquote(value.decode("ascii", "replace")))
        if what == b"alive":
            worker.answers = True
            return []
        if what in (b"ending", b"blocked") and worker.ready:
            said = cut(storable(unquote(value.decode("ascii", "replace"))), MESSAGE_LIMIT)
            if what == b"ending":
                worker.why = said
            else:
                self._blocks(worker, said)
            return []
        name, _, packed_result = value.partition(b" ")
        job, started = worker.jobs.get(unquote(name.decode("ascii", "replace")), (None, 0.0))
        if what != b"result" or job is None:
            raise ValueError(f"{cut(storable(repr(line[:60])), 100)}")
        try:
            return self._ended(worker, Result.unpacked(job.id, packed_result))
        except ValueError as error:
            return self._ended(worker, job.failed("infrastructure", str(error), started))

    def _died(self, worker: ProcessWorker) -> list[Result]:
        """Remove a process that ended, and log its exit code."""
        worker.process.join()
        worker.pipe.close()
        if worker.process.exitcode == NO_MAIN_GUARD:
            script = getattr(sys.modules["__main__"], "__file__", "your script")
            raise AgentrigError(
                f"{script} starts a run whenever it is imported, and each runner imports it.\n"
                '  Start the run in a block that only the script itself runs: if __name__ == "__main__":'
            )
        end_families([worker.process.pid], [worker.mark])  # for the case that its guard was killed
        code = f"({ending(worker.process.exitcode, 'exit code')})"
        opened = f"does the {self.builds} write to descriptors that it did not open?"
        refused = worker.refused and f"; it {worker.refused}: {opened}"
        if (worker.process.exitcode or 0) >= 0 and not refused:
            refused = f"; does the {self.builds}, or what it calls, call os._exit, or close files that it did not open?"
        if worker.why:
            refused = f": {worker.why}"
        ended = f": the {self.builds}, or what it imports, ended its process. An error above says why"
        died = f"; {self.cure} to see why"
        failed = self._remove_dead(
            worker,
            early=f" {code}{ended if (worker.process.exitcode or 0) > 0 else died}",
            died=f"{self.process} died {code}",
            why=refused,
        )
        log.warning("%s", self._died_words(worker, code, len(failed)))
        return failed

    def _died_words(self, worker: ProcessWorker, code: str, failed: int) -> str:
        """Say that a runner died, and what becomes of its rollouts."""
        again = len(worker.jobs) - failed
        anew = "; the ones that start again get new samples, so the seed will not repeat this run" if again else ""
        why = worker.why and f": {worker.why}"
        return f"{worker.title} died {code}{why}; {again} rollouts start again, {failed} failed{anew}"
