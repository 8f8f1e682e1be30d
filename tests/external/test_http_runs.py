"""Whole runs with the agent `http`: its service is a process of its own, killed in a step and replaced."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrig import hookimpl
from agentrig.plan import resolve
from agentrig.run.training import train

SERVICE = Path(__file__).with_name("sql_service.py")
STEPS, KILLED_IN, EACH = 5, 3, 16


class Services:
    """A service and one that is ready to replace it: killed in a step, and replaced once a rollout has failed."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.processes = [self._made(), self._made()]
        self.killed, self.replaced = threading.Event(), threading.Event()
        self.start(self.processes[0])

    def _made(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, str(SERVICE), str(self.port)], stdin=subprocess.PIPE)

    def start(self, process: subprocess.Popen[bytes]) -> None:
        """Let one listen, and wait for it."""
        assert process.stdin is not None
        process.stdin.close()  # readline returns
        end = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            except OSError:
                assert process.poll() is None
                assert time.monotonic() < end
                time.sleep(0.02)

    @hookimpl
    def on_rollout_end(self, rollout: Any) -> None:
        """Kill when the step's first rollout has ended; replace when one has failed."""
        if rollout.mode != "train" or rollout.step != KILLED_IN:
            return
        if not self.killed.is_set():
            self.killed.set()
            self.processes[0].kill()
            self.processes[0].wait()
        elif rollout.outcome.failure and not self.replaced.is_set():
            self.replaced.set()
            self.start(self.processes[1])


@pytest.fixture
def services() -> Iterator[Services]:
    made = Services()
    yield made
    for process in made.processes:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("route", "kinds"), [("solve", {"service-down"}), ("begin", {"service-down", "service-timeout"})]
)
def test_a_run_goes_on_when_its_service_is_killed_and_replaced(
    services: Services, tmp_path: Path, route: str, kinds: set[str]
) -> None:
    own = [f"run.directory={tmp_path}", "run.name=run", 'run.block=["report"]', "run.failure_limit=0.9"]
    own += [f"algorithm.steps={STEPS}", "algorithm.tasks_per_step=4", f"algorithm.group_size={EACH // 4}"]
    own += ["algorithm.validate_every=0", "run.report_tasks=4", "hardware.use=cpu", "hardware.threads=1"]
    own += ["runners.n=1", "runners.threads=4", f"agent.url=http://127.0.0.1:{services.port}/{route}"]
    # A service that dies after its 202 never calls back.
    own += ["agent.retries=1", "agent.restart_s=1", "agent.timeout_s=15", "adapter.match="]
    plan = resolve("mini", overrides=own, uses={"agent": "http", "server": "embedded"})
    plan.registry.add_observer(services, "services")
    summary = train(plan)

    assert services.replaced.is_set()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["rollouts"] for line in lines] == [EACH] * STEPS
    failed = {line["step"]: Counter(line["failures"]) for line in lines}
    assert failed.pop(KILLED_IN).keys() <= kinds
    assert set(map(len, failed.values())) == {0}
    assert set(summary["failures"]) <= kinds
    assert 1 <= sum(summary["failures"].values()) < EACH
    for line in lines:
        answered = EACH - sum(line["failures"].values())
        assert line["calls"]["recorded"] >= answered
        assert line["reward"] is not None
    assert lines[-1]["reward"] > 0
