"""The proof of delivery in the background: which threads query, which wait, and what happens if something ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from agentrig_grpo import checkpoint
from agentrig_grpo.config import GrpoConfig
from agentrig_grpo.learner import Learner
from agentrig_grpo.server.handle import Embedded
from embedded_servers import embedded, health
from proof_runs import Backend, balanced

from agentrig import Endpoint
from agentrig.delivery import Delivery
from agentrig.errors import RunStopped
from agentrig.testing.tiny_model import make_model, make_tokenizer

IDS = [2, *range(40, 70)]


class Watched(Learner):
    """The learner, which notes the threads that use it."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.threads: set[int] = set()

    def logprobs(self, *given: Any, **more: Any) -> list[float]:
        self.threads.add(threading.get_ident())
        return super().logprobs(*given, **more)

    def digests(self, dtype: str) -> dict[str, str]:
        self.threads.add(threading.get_ident())
        return super().digests(dtype)


class Stage:
    """A learner, its server behind a gate that can be closed, and the proofs of a run."""

    def __init__(self, folder: Path, server: Embedded, learner: Watched, base_url: str) -> None:
        self.server, self.learner = server, learner
        self.delivery = Delivery(folder)
        self.endpoint = Endpoint(base_url=base_url, model="policy", sampling={"temperature": 1.0})
        self.gate = threading.Event()
        self.gate.set()

    def begin(self, version: int, **more: Any) -> None:
        self.delivery.begin(
            version=version,
            learner=self.learner,
            dtype="float32",
            servers=[self.endpoint],
            context=64,
            prompt=lambda: IDS,
            **more,
        )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    checkpoint.save(make_model(), make_tokenizer(), folder)
    return folder


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Embedded]:
    with embedded(model, name="policy", slots=4) as found:
        yield found


@pytest.fixture
def stage(model: Path, tmp_path: Path, server: Embedded) -> Iterator[Stage]:
    torch.set_num_threads(1)
    learner = Watched(checkpoint.load_model(model), GrpoConfig(model=str(model)), dtype="float32", seed=0)
    with gated(server) as (base_url, gate):
        made = Stage(tmp_path, server, learner, base_url)
        made.gate = gate
        yield made
        gate.set()


@contextmanager
def gated(server: Embedded) -> Iterator[tuple[str, threading.Event]]:
    """Run a balancer in front of a server that passes a connection on once its gate is open."""
    gate = threading.Event()
    gate.set()

    class Gated(Backend):
        @property
        def api_key(self) -> str:  # read just before a request is passed on
            assert gate.wait(60)
            return server.api_key

        @api_key.setter
        def api_key(self, value: str) -> None:
            pass

    with balanced([Gated(server.base_url, "")]) as balancer:
        yield balancer.url, gate


def test_the_run_goes_on_while_the_server_is_asked(stage: Stage) -> None:
    stage.gate.clear()
    stage.begin(0)
    assert stage.learner.threads == set(), "the learner has not been asked"
    assert stage.delivery.step.proofs == 0
    waiting = threading.Thread(target=lambda: (time.sleep(0.2), stage.gate.set()))
    waiting.start()
    stage.delivery.settle()
    waiting.join()
    found = stage.delivery.summary()
    assert (found["proofs"], found["arrived"]) == (1, 1)
    assert len(stage.learner.threads) == 1
    assert threading.get_ident() not in stage.learner.threads, "the run's own thread does not wait for the learner"
    line = stage.delivery.line()
    assert line["background_s"] > 0.15
    assert line["version"] == 0


@pytest.mark.parametrize("call", ["prepare", "begin", "sign"])
def test_the_next_call_gives_the_verdict_first(stage: Stage, tmp_path: Path, call: str) -> None:
    stage.begin(0)
    stage.delivery.settle()
    with torch.no_grad():
        next(iter(stage.learner.trained.values())).mul_(1.001)  # and nobody sends it
    stage.begin(1)
    calls: dict[str, Any] = {
        "prepare": lambda: stage.delivery.prepare([stage.endpoint]),
        "begin": lambda: stage.begin(2),
        "sign": lambda: stage.delivery.signature()(tmp_path),
    }
    with pytest.raises(RunStopped, match=r"step 1: the weights of version 1 did not arrive at http") as stopped:
        calls[call]()
    assert "answers with the weights of version 0; the learner's are version 1" in str(stopped.value)
    assert not (tmp_path / "trainer").exists(), "no checkpoint is signed"


@pytest.mark.slow
def test_a_server_that_ends_while_it_is_asked_is_named(stage: Stage, model: Path) -> None:
    with (
        embedded(model, name="policy", slots=4) as server,
        gated(server) as (base_url, gate),
    ):
        stage.endpoint = Endpoint(base_url=base_url, model="policy")
        gate.clear()
        stage.begin(3)
        server.stop()
        gate.set()
        with pytest.raises(RunStopped, match=r"step 3: the model server http://\S+ does not answer"):
            stage.delivery.settle()


@pytest.mark.alone
def test_ctrl_c_ends_the_wait_for_a_server_that_hangs(stage: Stage) -> None:
    stage.gate.clear()
    stage.begin(0)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    begun = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            stage.delivery.settle()
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - begun < 5
    names = [thread for thread in threading.enumerate() if thread.name == "delivery"]
    assert all(thread.daemon for thread in names), "the process can end without them"


def test_at_the_end_of_a_run_nothing_uses_the_learner_any_more(stage: Stage) -> None:
    inside, leave = threading.Event(), threading.Event()

    def slow(dtype: str) -> dict[str, str]:
        inside.set()
        assert leave.wait(30)
        return {}

    stage.learner.digests = slow  # type: ignore[method-assign]
    stage.begin(0)
    assert inside.wait(30)
    threading.Timer(0.3, leave.set).start()
    stage.delivery.end()
    assert leave.is_set(), "it waited for the thread that was computing"
    stage.learner.threads.clear()
    with pytest.raises(RunStopped, match="the run has ended"):
        stage.delivery.settle()
    assert stage.learner.threads == set()


def test_the_probe_is_put_into_the_cache_before_a_transfer(stage: Stage) -> None:
    stage.begin(0)
    stage.delivery.settle()
    before = health(stage.server)["counts"]
    stage.delivery.prepare([stage.endpoint])
    after = health(stage.server)["counts"]
    assert after["prompts"] == before["prompts"] + 1
    assert after["prefills"] == before["prefills"], "it was still in the cache"
