"""The runners `lightning` keep what a pool promises, and the doctor sees what other machines can't reach."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from agentrig_lightning.joining import check_gateway
from model_server import ModelServer

from agentrig.endpoints import Endpoint
from agentrig.errors import ConfigError
from agentrig.findings import Situation
from agentrig.plan import resolve
from agentrig.pools import Job
from agentrig.processes.ends import Interrupted
from agentrig.run.training import train
from agentrig.testing import check


@pytest.mark.slow
def test_the_kit_finds_nothing_else() -> None:
    """But the room: the store takes every job, because nobody knows how many runners will join."""
    report = check("runners", "lightning", settings={"store": "127.0.0.1:0"}, ends_s=40.0, raise_failed=False)
    assert [r.check for r in report.results if r.status != "passed"] == ["runners.counts"], report


def test_the_doctor_names_a_gateway_that_runners_elsewhere_cannot_reach(toy_file: str) -> None:
    def found(*overrides: str) -> list[Any]:
        plan = resolve("toy", overrides=["gateway.use=on", *overrides], files=[toy_file])
        return list(check_gateway(Situation(hardware=None, plan=plan)))

    wide = ("runners.use=lightning", "runners.store=0.0.0.0:4747")
    (finding,) = found(*wide)
    assert (finding.result, "gateway.host=0.0.0.0" in finding.cure) == ("warning", True)
    assert found(*wide, "gateway.host=0.0.0.0") == found("runners.use=lightning") == found() == []


WITHOUT_RUNNERS = ("runners.use=lightning", "runners.n=0", "runners.store=127.0.0.1:0")


def test_one_signal_ends_a_run_that_no_runner_has_joined(
    model: ModelServer, toy_file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def signal_once() -> None:
        while "rollouts wait for a runner" not in caplog.text:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    own = [f"algorithm.endpoint={model.url}", f"run.directory={tmp_path}"]
    plan = resolve("toy", overrides=[*WITHOUT_RUNNERS, *own], files=[toy_file])
    thread = threading.Thread(target=signal_once, daemon=True)
    thread.start()
    with pytest.raises(Interrupted, match="ended while its rollouts waited for a runner; resume with: agentrig train"):
        train(plan)
    thread.join()
    assert not any("ending after" in message for message in caplog.messages)


def test_a_batch_of_which_a_runner_has_taken_a_rollout_is_not_untouched(toy_file: str) -> None:
    with resolve("toy", overrides=WITHOUT_RUNNERS, files=[toy_file]).runner_pool() as made:
        pool: Any = made
        assert not pool.untouched
        pool.submit(Job(id="a", input={}, endpoint=Endpoint(base_url="http://127.0.0.1:1", model="m", api_key="k")))
        assert pool.untouched
        pool.store.leases.take("a", "at-1", "elsewhere")
        assert not pool.untouched


def test_only_these_runners_may_be_none(toy_file: str) -> None:
    assert resolve("toy", overrides=["runners.use=lightning", "runners.n=0"], files=[toy_file]).runners.n == 0
    with pytest.raises(ConfigError, match="'n' must be >= 1"):
        resolve("toy", overrides=["runners.n=0"], files=[toy_file])
    with pytest.raises(ConfigError, match=r"It is a key of lightning: runners\.use=lightning selects it"):
        resolve("toy", overrides=["runners.store=127.0.0.1:1"], files=[toy_file])
