"""Runners that join a run over the network: late, killed, asked to leave, and Agent Lightning's own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest
from model_server import ModelServer

from agentrig.plan import Plan, resolve
from agentrig.run.training import train

TOKEN = "a-token-of-this-test-4567"
SHARED = ["runners.use=lightning", 'runners.store_token={env="STORE_TOKEN"}', "runners.n=0"]
"""The settings of a run whose rollouts others run, beside its address."""
SUPPORT = Path(__file__).parents[3] / "tests" / "support"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


class Run:
    """A run in a thread, with a store for others."""

    def __init__(self, plan: Plan, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.found: dict[str, Any] = {}
        self.error: BaseException | None = None
        self._plan, self._thread = plan, threading.Thread(target=self._run, daemon=True)
        self.client = httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {TOKEN}"}, trust_env=False)

    def _run(self) -> None:
        try:
            self.found = train(self._plan)
        except BaseException as error:
            self.error = error

    def start(self) -> None:
        self._thread.start()
        self.wait(lambda: self.client.get("/v1/agl/health").status_code == 200)

    def wait(self, until: Any) -> None:
        while True:
            assert self._thread.is_alive(), self.error
            with contextlib.suppress(httpx.TransportError):
                if until():
                    return
            time.sleep(0.05)

    def end(self) -> dict[str, Any]:
        self._thread.join(200)
        assert not self._thread.is_alive()
        self.client.close()
        if self.error is not None:
            raise self.error
        return self.found

    def busy(self, pid: int) -> bool:
        """Whether a runner holds a rollout."""
        held = self.client.get("/v1/agl/rollouts", params={"status_in": ["preparing", "running"]}).json()["items"]
        return any(f"-{pid}-" in str(r.get("attempt", {}).get("worker_id")) for r in held)


@pytest.fixture
def joined() -> Iterator[list[subprocess.Popen[str]]]:
    """The runner processes of a test; those that are left are killed."""
    made: list[subprocess.Popen[str]] = []
    yield made
    for process in made:
        if process.poll() is None:
            process.kill()
        process.communicate()


def join(joined: list[subprocess.Popen[str]], run: Run, toy_file: str) -> subprocess.Popen[str]:
    words = ["runner", "--store", run.url, "--plugin", toy_file, "-n", "1", "--threads", "2"]
    environment = {**os.environ, "AGL_STORE_TOKEN": TOKEN}
    process = subprocess.Popen(
        [sys.executable, "-m", "agentrig", *words], env=environment, stderr=subprocess.PIPE, text=True
    )
    joined.append(process)
    return process


def what_counts(folder: Path) -> dict[str, list[tuple[Any, ...]]]:
    """What a run has recorded of its rollouts, without ids and times."""
    found = {}
    for file in sorted((folder / "r" / "rollouts").glob("*.parquet")):
        rows = pq.read_table(file).to_pylist()
        assert len({row["id"] for row in rows}) == len(rows)
        names = ("task_id", "group", "failure", "value", "answer", "calls", "triplets", "prompt_tokens")
        found[file.stem] = [tuple(row[name] for name in names) for row in rows]
    return found


def figures(folder: Path) -> list[tuple[Any, ...]]:
    lines = [json.loads(text) for text in (folder / "r" / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "reward", "reward_std", "accuracy", "rollouts", "failures", "nodes", "algorithm", "call_tokens")
    return [tuple(str(line[name]) for name in names) for line in lines]


@pytest.mark.slow
def test_one_joins_late_one_is_killed_and_one_leaves(
    model: ModelServer,
    tmp_path: Path,
    toy_file: str,
    joined: list[subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STORE_TOKEN", TOKEN)

    def plan(folder: str, *overrides: str) -> Plan:
        own = [f"algorithm.endpoint={model.url}", f"run.directory={tmp_path / folder}", "run.name=r"]
        own += ['tasks.do=["slow"]', "algorithm.report=false", "run.validation_tasks=2"]
        return resolve("toy", overrides=[*own, *overrides], files=[toy_file])

    train(plan("alone"))
    port = free_port()
    run = Run(plan("shared", *SHARED, f"runners.store=127.0.0.1:{port}", "runners.lease_s=5"), port)
    run.start()
    first, second = join(joined, run, toy_file), join(joined, run, toy_file)
    run.wait(lambda: run.busy(second.pid))
    second.send_signal(signal.SIGKILL)
    third = join(joined, run, toy_file)
    run.wait(lambda: run.busy(third.pid) and run.busy(first.pid))
    first.send_signal(signal.SIGTERM)
    said = first.communicate(timeout=60)[1]
    assert first.returncode == 143, said
    assert "left the run after" in said
    run.end()
    assert what_counts(tmp_path / "shared") == what_counts(tmp_path / "alone")
    assert figures(tmp_path / "shared") == figures(tmp_path / "alone")
    said += third.communicate(timeout=60)[1]
    assert third.returncode == 0, said
    assert "the run has ended" in said
    assert TOKEN not in said


@pytest.mark.slow
def test_agent_lightnings_own_runner_joins_by_hand(
    model: ModelServer,
    tmp_path: Path,
    toy_file: str,
    joined: list[subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STORE_TOKEN", TOKEN)
    port = free_port()
    own = [f"algorithm.endpoint={model.url}", f"run.directory={tmp_path}", "run.name=r", "run.train_tasks=8"]
    own.append(f"runners.store=127.0.0.1:{port}")
    uses = {"algorithm": "alg-waits", "reward": "own"}
    plugins = [toy_file, str(SUPPORT / "lightning_faults.py")]
    run = Run(resolve("toy", overrides=[*own, *SHARED], uses=uses, files=plugins), port)
    run.start()
    words = [str(SUPPORT / "upstream_runner.py"), run.url.replace("//", f"//any:{TOKEN}@"), "3"]
    keep = {k: v for k, v in os.environ.items() if not k.startswith("AGENTRIG")}
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "AGENTOPS_TELEMETRY": "False", "AGENTOPS_LOG_LEVEL": "CRITICAL"}
    joined.append(
        subprocess.Popen(
            [sys.executable, *words], env={**keep, **quiet}, cwd=tmp_path, stderr=subprocess.PIPE, text=True
        )
    )
    summary = run.end()
    rows = pq.read_table(tmp_path / "r" / "rollouts" / "train-00001.parquet").to_pylist()
    assert sorted(json.loads(row["input"])["number"] for row in rows) == list(range(8))
    for row in rows:
        number = json.loads(row["input"])["number"]
        if number == 5:
            assert row["failure"] == "agent-error"
            continue
        assert (row["failure"], row["value"], row["calls"]) == (None, float(number % 2), 1), row["message"]
    assert (summary["train_rollouts"], summary["failures"]) == (8, {"agent-error": 1})
