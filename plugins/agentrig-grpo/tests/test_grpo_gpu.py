"""Tests that need a CUDA device."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
import torch
from agentrig_grpo import checkpoint
from agentrig_grpo.config import GrpoConfig
from agentrig_grpo.learner import Learner, TrainSample
from agentrig_grpo.server.decoder import LlamaDecoder
from agentrig_grpo.server.engine import Engine, Request
from embedded_servers import embedded

from agentrig.delivery.asking import ask
from agentrig.delivery.digests import digests
from agentrig.endpoints import Endpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


def test_what_is_sampled_in_bf16_has_a_ratio_near_one_in_the_learner(make_model):
    model = make_model(initializer_range=0.05).to("cuda")
    decoder = LlamaDecoder(
        model.config, model.state_dict(), device="cuda", dtype=torch.bfloat16, slots=32, max_length=128
    )
    engine = Engine(decoder, eos=[1], slots=32)
    requests = [Request(tuple(range(5, 30)), 20, seed=i) for i in range(32)]
    for request in requests:
        engine.submit(request)
    while engine.busy:
        engine.tick()
    samples = [
        TrainSample(
            prompt_ids=r.prompt,
            response_ids=r.tokens,
            logprobs=r.logprobs,
            advantage=1.0 if i % 2 else -1.0,
            rollout=i,
            group="g",
        )
        for i, r in enumerate(requests)
    ]
    metrics = Learner(model, GrpoConfig(lr=1e-4), dtype="bfloat16", seed=0).update(samples, step=1)
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=0.02)
    assert metrics["ratio_max"] < 1.2
    assert metrics["weight_change"] > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_reach_the_server_within_the_device(make_model, model_dir, dtype):
    """They are in the device's memory, which both processes have open; every tensor arrives bit by bit, each time."""
    model = make_model(seed=1).to("cuda")
    named = set(os.listdir("/dev/shm"))
    with embedded(model_dir, device="cuda", dtype=dtype, slots=4, max_length=96) as server:
        mine = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
        endpoint = Endpoint(base_url=server.base_url, model="tiny", api_key=server.api_key)
        for version in (1, 2, 3):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.01)
            server.take(checkpoint.weights(model), version)
            assert server._sender._memory is not None, "no copy went through the host"
            answer = ask(endpoint, [5, 6, 7])
            ours = digests(checkpoint.weights(model).items(), getattr(torch, dtype))
            assert answer.version == version
            assert answer.digests
            assert all(ours[name] == value for name, value in answer.digests.items())
    # other runs of the host have files there too; torch and CUDA name theirs by the process, in decimal or hexadecimal
    left = set(os.listdir("/dev/shm")) - named
    assert [name for name in left if any(str(pid) in name or f"{pid:x}" in name for pid in mine)] == []


def test_device_memory_is_free_again_after_a_kill(make_model, model_dir):
    model = make_model(seed=1).to("cuda")
    with embedded(model_dir, device="cuda", slots=4, max_length=96) as server:
        server.take(checkpoint.weights(model), 1)
        used = torch.cuda.mem_get_info()[0]
        os.kill(server.pid, signal.SIGKILL)
        psutil.wait_procs([psutil.Process(server.pid)], timeout=20)
    assert torch.cuda.mem_get_info()[0] > used
