"""The server `embedded` under the contract of `agentrig.servers`: start, weights, sleep, end, crash."""

import os
import signal
from types import SimpleNamespace

import pytest
import torch
from agentrig_grpo import checkpoint, learner, lora, register_servers
from agentrig_grpo.config import EmbeddedConfig, GrpoConfig
from agentrig_grpo.server.handle import Embedded
from proof_runs import ProofSession, run

from agentrig.errors import OutOfMemory, RunStopped
from agentrig.hardware import Cpu, CpuConfig
from agentrig.processes.servers import ServerError
from agentrig.servers import ServerPlan
from agentrig.testing import checks

CPU = Cpu(config=CpuConfig(threads=2))


def plan_of(directory, **more):
    return ServerPlan(model=directory, name="policy", hardware=CPU, context=96, seed=3, **more)


@pytest.fixture
def server(model_dir, tmp_path):
    with Embedded(EmbeddedConfig(batch=4), plan_of(model_dir, log=tmp_path / "server.log")) as running:
        yield running


def test_the_plan_and_the_keys_reach_the_process(server, model_dir):
    (endpoint,) = server.endpoints
    assert (server.context, server.dtype, endpoint.model) == (96, "float32", "policy")
    assert endpoint.token_ids
    assert server.held() is None, "the digests come with its answers"
    settings = server.settings
    assert [settings[key] for key in ("batch", "threads", "seed", "memory")] == [4, 1, 3, 0]
    assert Embedded(EmbeddedConfig(), plan_of(model_dir, memory=5 << 30)).settings["memory"] == 5 << 30
    assert Embedded(EmbeddedConfig(threads=2), plan_of(model_dir)).settings["threads"] == 2


KIT = checks("server", "embedded", settings={"batch": 4, "threads": 1})
LONG = ("server.names-its-death", "server.ends-with-its-run")


@pytest.mark.parametrize(
    "check", [pytest.param(c, id=str(c), marks=[pytest.mark.slow] * (str(c) in LONG)) for c in KIT]
)
def test_the_kit(check):
    check()


def test_auto_selects_it_only_if_no_other_server_can_be_used():
    (spec,) = register_servers()
    assert (spec.name, spec.rank, spec.refusal) == ("embedded", 0, None)
    assert spec.sequences(spec.config(batch=3)) == 3
    assert isinstance(spec.build(spec.config())(plan_of("x")), Embedded)


@pytest.mark.slow
def test_server_sleep_frees_memory_before_each_update(model_dir, tmp_path, monkeypatch):
    """`algorithm.server_sleep`: sleep comes between a step's rollouts and its update, wake before the new weights."""
    told = []
    monkeypatch.setattr(learner, "give_memory_back", lambda device: told.append("the learner gives memory back"))

    class Telling(Embedded):
        def take(self, weights, version):
            told.append(f"take {version}")
            super().take(weights, version)

        def sleep(self):
            told.append("sleep")
            super().sleep()

        def wake(self):
            told.append("wake")
            super().wake()

    class Session(ProofSession):
        def rollouts(self, *args, **more):
            told.append("rollouts")
            return super().rollouts(*args, **more)

    def made(plan):
        told.append(f"sleeps {plan.sleeps}")
        return Telling(EmbeddedConfig(), plan)

    for sleeps, between in ((False, []), (True, ["sleep", "the learner gives memory back", "wake"])):
        told.clear()
        session = Session(tmp_path / str(sleeps))
        session.make = made
        run(tmp_path / str(sleeps), model_dir, session, steps=1, server_sleep=sleeps)
        assert told == [f"sleeps {sleeps}", "take 0", "rollouts", *between, "take 1"]
        assert session.delivery.summary()["arrived"] == 2
    assert GrpoConfig().server_sleep == "auto"  # which is never on a CPU


TORCH = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.18 GiB of which 19.62 MiB is "
    "free. Including non-PyTorch memory, this process has 40.90 GiB memory in use."
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("take", r"step 0: the way of the new weights to the server: .*20\.0 MiB were .*\n.*algorithm\.server_sleep"),
        (
            "wake",
            r"step 1: the server's waking after the update: .*holds 40\.9 GiB.*\n.*less of the device in \[server\]",
        ),
        ("digests", r"step 0: the proof of delivery: .*\n.*run\.delivery = false"),
        ("loading", r"the learner's model could not be loaded: .*\n.*algorithm\.lora_rank = 16"),
        ("merge", r"step 0: the way of the new weights to the server: .*20\.0 MiB were .*\n.*algorithm\.server_sleep"),
        ("validation", r"^the LLM server could not answer: .* the server holds 40\.9 GiB.*\n.*server\.kv_cache_mb"),
    ],
)
def test_memory_that_runs_out_beside_the_update_is_named(model_dir, tmp_path, monkeypatch, where, words):
    def fail(*_, **__):
        raise torch.OutOfMemoryError(TORCH)

    class Failing(Embedded):
        take = fail if where == "take" else Embedded.take
        wake = fail if where == "wake" else Embedded.wake

    more = {"lora_rank": 4} if where == "merge" else {}
    if where == "digests":
        monkeypatch.setattr(learner.Learner, "digests", fail)
    if where == "loading":
        monkeypatch.setattr(checkpoint, "load_model", fail)
    if where == "merge":
        monkeypatch.setattr(lora.MergedWeights, "__getitem__", fail)

    class Session(ProofSession):
        def validate(self, endpoint, *, step):
            with (tmp_path / "server.log").open("a") as log:
                log.write(f"torch.OutOfMemoryError: {TORCH}\n")
            os.kill(servers[0].pid, signal.SIGKILL)
            raise RunStopped("all rollouts failed") from ConnectionResetError()

    def made(plan):
        servers.append(Failing(EmbeddedConfig(), plan))
        return servers[0]

    servers, session = [], Session(tmp_path)
    session.make = made
    session.runtime = SimpleNamespace(end_results=lambda error: None)
    with pytest.raises(OutOfMemory, match=words) as caught:
        run(tmp_path, model_dir, session, steps=1, server_sleep=True, validate_every=int(where == "validation"), **more)
    assert caught.value.cause == "out-of-memory"
    assert "Traceback" not in str(caught.value)


def test_a_server_whose_device_is_full_says_what_to_set(model_dir, tmp_path):
    class Process:
        exit_status = 1

        def receive(self, what, timeout_s):
            raise ServerError("the LLM server has died, asked to start (exit status 1)")

        def tail(self, lines):
            return f"Traceback (most recent call last):\n  File x\ntorch.OutOfMemoryError: {TORCH}\nclosed"

        def stop(self, grace_s=0.0):
            pass

    server = Embedded(EmbeddedConfig(), plan_of(model_dir, log=tmp_path / "server.log"))
    server._process = Process()
    with pytest.raises(OutOfMemory) as caught:
        server.ready()
    first, cure, log = str(caught.value).splitlines()
    assert first.startswith(
        "the LLM server could not start: its device ran out of memory: 20.0 MiB were asked for; of "
    )
    assert "server.kv_cache_mb" in cure
    assert log == f"  its log: {tmp_path / 'server.log'}"
