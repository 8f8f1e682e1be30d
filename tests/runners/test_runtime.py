"""The runtime: jobs go in and results come out, and a run ends whatever its pool or its algorithm does."""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from agentrig import Endpoint, Outcome
from agentrig.errors import AgentrigError
from agentrig.pools import Job, Result
from agentrig.processes.ends import Interrupted
from agentrig.runners import runtime as module
from agentrig.runners.runtime import Runtime
from agentrig.traces import Trace

ENDPOINT = Endpoint(base_url="http://127.0.0.1:9/v1", model="m")


class OnePool:
    """A pool that answers each job at once, two at a time."""

    n, room, replaced, deadline_s, retries = 2, 2, 0, 9.0, 0

    def __init__(self, poll: Callable[[], None] = lambda: None) -> None:
        self.built, self.closed = threading.Event(), 0
        self._jobs: list[Job] = []
        self._poll, self._woken = poll, threading.Event()

    @property
    def pending(self) -> int:
        return len(self._jobs)

    def start(self) -> None:
        self.built.set()

    def submit(self, job: Job) -> None:
        self._jobs.append(job)
        assert len(self._jobs) <= self.room, "the queue stays in the runtime"

    def wake(self) -> None:
        self._woken.set()

    def poll(self, timeout_s: float) -> Sequence[Result]:
        self._poll()
        if not self._jobs:
            self._woken.wait(timeout_s)
            self._woken.clear()
        jobs, self._jobs = self._jobs, []
        return [
            Result(id=j.id, outcome=Outcome(answer=j.input), trace=Trace(rollout_id=j.id), start=0.0, duration_s=0.0)
            for j in jobs
        ]

    def close(self) -> None:
        self.closed += 1


def jobs(*names: str) -> list[Job]:
    return [Job(id=name, input={"of": name}, endpoint=ENDPOINT) for name in names]


def answers(runtime: Runtime, *names: str) -> list[Any]:
    """Submit jobs, and return the answers that came for them."""
    results: module.Results = queue.SimpleQueue()
    runtime.submit(jobs(*names), results)
    found = []
    for _ in names:
        result = results.get(timeout=20)
        if isinstance(result, Exception):
            raise result
        found.append(result.outcome.answer["of"])
    return found


def test_each_gets_its_own_results() -> None:
    """Two batches at once, as when rollouts run ahead, do not take each other's results."""
    runtime = Runtime(OnePool())  # type: ignore[arg-type]
    found: dict[str, list[Any]] = {}

    def body() -> None:
        def ask(batch: str) -> None:
            found[batch] = answers(runtime, *(f"{batch}{i}" for i in range(50)))

        threads = [threading.Thread(target=ask, args=(batch,)) for batch in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    runtime.run(body)
    assert {batch: sorted(names) for batch, names in found.items()} == {
        batch: sorted(f"{batch}{i}" for i in range(50)) for batch in "ab"
    }
    assert runtime.pool.closed == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("broken", [AgentrigError("no room on any node"), KeyError("a fault of the pool")])
def test_a_broken_pool_ends_the_run_with_its_error(broken: Exception) -> None:
    def poll() -> None:
        raise broken

    runtime = Runtime(OnePool(poll))  # type: ignore[arg-type]
    with pytest.raises(AgentrigError, match=r"no room on any node|runners failed: KeyError: 'a fault of the pool'"):
        runtime.run(lambda: print(answers(runtime, "a"), answers(runtime, "b")))
    with pytest.raises(AgentrigError):  # also for an algorithm that has not noticed
        Runtime(OnePool(poll)).run(lambda: time.sleep(0.3))  # type: ignore[arg-type]


def test_a_pool_that_cannot_start_ends_an_algorithm_that_waits_for_other_things(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one of Agent Lightning does, which waits for its store: the port of the store is taken."""
    monkeypatch.setattr(module, "UNWIND_S", 0.2)
    never = threading.Event()

    class NoPort(OnePool):
        def start(self) -> None:
            raise AgentrigError("the port is taken")

    def body() -> None:
        never.wait(30)

    runtime = Runtime(NoPort())  # type: ignore[arg-type]
    start = time.monotonic()
    with pytest.raises(AgentrigError, match="the port is taken"):
        runtime.run(body)
    assert (time.monotonic() - start < 20, runtime.pool.closed) == (True, 1)  # type: ignore[attr-defined]
    never.set()


def test_a_pool_that_hangs_does_not_keep_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STOP_S", 0.2)
    hangs = threading.Event()
    runtime = Runtime(OnePool(lambda: hangs.wait(30) and None))  # type: ignore[arg-type, func-returns-value]
    start = time.monotonic()
    runtime.run(lambda: None)
    assert (time.monotonic() - start < 10, runtime.pool.closed) == (True, 1)  # type: ignore[attr-defined]
    hangs.set()


@pytest.mark.parametrize("at_once", [False, True])
def test_an_algorithm_that_hangs_is_left_behind(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNWIND_S", 20.0 if at_once else 0.2)
    hangs = threading.Event()
    runtime = Runtime(OnePool())  # type: ignore[arg-type]
    ended, start = Interrupted(15, "ended", at_once=at_once), time.monotonic()
    threading.Timer(0.2, runtime.abort, [ended]).start()
    with pytest.raises(Interrupted) as caught:
        runtime.run(lambda: hangs.wait(30) and None)  # type: ignore[func-returns-value]
    assert (caught.value is ended, ended.abandoned, time.monotonic() - start < 10) == (True, True, True)
    hangs.set()


def test_an_aborted_algorithm_that_waits_for_rollouts_unwinds() -> None:
    runtime = Runtime(OnePool())  # type: ignore[arg-type]
    unwound: list[str] = []

    def body() -> None:
        waits: module.Results = queue.SimpleQueue()
        runtime.submit([], waits)
        runtime._waiting["lost"] = waits
        try:
            error = waits.get(timeout=20)
            assert isinstance(error, Exception)
            raise error
        finally:
            unwound.append("yes")

    threading.Timer(0.2, runtime.abort, [Interrupted(2, "Ctrl-C")]).start()
    with pytest.raises(Interrupted, match="Ctrl-C") as caught:
        runtime.run(body)
    assert (unwound, caught.value.abandoned) == (["yes"], False)


def test_a_run_that_is_aborted_before_it_starts_does_not_start() -> None:
    runtime, ran = Runtime(OnePool()), []  # type: ignore[arg-type]
    with pytest.raises(Interrupted):
        runtime.abort(Interrupted(2, "Ctrl-C"))
    with pytest.raises(Interrupted):
        runtime.run(lambda: ran.append(1))
    assert (ran, runtime.pool.closed) == ([], 1)  # type: ignore[attr-defined]


def test_a_signal_that_another_thread_took_is_handled_at_once() -> None:
    handled = threading.Event()

    def body() -> None:
        time.sleep(0.5)  # until the main thread waits
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # as after SIGSTOP: the main thread is not woken
        assert handled.wait(5), "the handler runs in the main thread"

    before = signal.signal(signal.SIGINT, lambda number, frame: handled.set())
    try:
        Runtime(OnePool()).run(body)
    finally:
        signal.signal(signal.SIGINT, before)
