"""New weights over the channel: all or none are loaded, for both decoders, with a real server process."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import httpx
import pytest
import torch
from agentrig_grpo import checkpoint
from agentrig_grpo.server import transfer
from agentrig_grpo.server.handle import ServerError
from embedded_servers import embedded
from quick import quick_first

from agentrig.servers import Measuring

KINDS = {"qwen2": {}, "llama": {"attention_bias": True, "tie_word_embeddings": False}, "gpt2": {}}


def model_of(make_model, kind, seed=0):
    if kind != "gpt2":
        return make_model(kind, seed=seed, **KINDS[kind])
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=128, eos_token_id=1, bos_token_id=1)
    config.initializer_range = 0.2
    return GPT2LMHeadModel(config).eval()


@pytest.fixture(scope="module", params=quick_first(KINDS, ("qwen2",)))
def served(request, make_model, tokenizer, tmp_path_factory):
    directory = tmp_path_factory.mktemp("served")
    checkpoint.save(model_of(make_model, request.param), tokenizer, directory)
    with embedded(directory, slots=4, max_length=96) as server:
        yield server, lambda seed: model_of(make_model, request.param, seed)


def answer(server):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "name"}], "temperature": 0, "max_tokens": 8}
    body |= {"return_token_ids": True, "logprobs": True}
    headers = {"Authorization": f"Bearer {server.api_key}"}
    reply = httpx.post(f"{server.base_url}/chat/completions", json=body, headers=headers, timeout=60).json()
    logprobs = [entry["logprob"] for entry in reply["choices"][0]["logprobs"]["content"]]
    return reply["system_fingerprint"], reply["choices"][0]["token_ids"], logprobs


def spoiled(weights, how):
    names = [name for name, tensor in weights.items() if tensor.ndim == 2]
    name = names[-1]
    tensor = weights[name].clone()
    if how == "missing":
        del weights[name]
    elif how == "shape":
        weights[name] = tensor[:, :-1].contiguous()
    elif how == "dtype":
        weights[name] = torch.zeros(tensor.shape, dtype=torch.int32)
    elif how == "unknown":
        weights["model.layers.9.extra"], name = tensor, "model.layers.9.extra"
    else:
        tensor[-1, -1] = float(how)
        weights[name] = tensor
    return name


@pytest.mark.parametrize("how", ["missing", "shape", "dtype", "unknown", "nan", "inf", "-inf"])
def test_weights_that_do_not_fit_change_nothing(served, how):
    server, make = served
    server.take(checkpoint.weights(make(4)), 4)
    before = answer(server)
    weights = dict(checkpoint.weights(make(5)))
    name = spoiled(weights, how)
    words = {
        "missing": "is missing",
        "shape": "has the shape",
        "dtype": "is torch.int32; the server computes in torch.float32",
        "unknown": "is unknown to the model",
    }.get(how, "holds NaN or infinity")
    with pytest.raises(ServerError, match=rf"could not take the weights of version 5: {name} {words}"):
        server.take(weights, 5)
    assert answer(server) == before
    assert before[0] == "v4"
    server.take(checkpoint.weights(make(5)), 5)
    fitting = answer(server)
    assert fitting[0] == "v5"
    assert fitting[2] != before[2]


def test_a_server_says_what_it_holds_of_a_device_that_counts(served):
    server, _ = served
    assert isinstance(server, Measuring)
    assert server.device_memory() is None, "a CPU"
    assert answer(server)


def test_transfers_leave_no_file_and_no_memory_behind(served):
    server, make = served

    def descriptors(pid):
        return len(os.listdir(f"/proc/{pid}/fd"))

    def mapped(pid):
        with open(f"/proc/{pid}/maps") as file:
            return sum("agentrig-weights" in line for line in file)

    kept = mapped(os.getpid())  # of servers that other tests have not ended
    server.take(checkpoint.weights(make(1)), 1)
    before = descriptors(os.getpid()), descriptors(server.pid)
    named = set(os.listdir("/dev/shm"))
    for version in range(2, 6):
        server.take(checkpoint.weights(make(version)), version)
    assert (descriptors(os.getpid()), descriptors(server.pid)) == before
    assert not any(name.startswith("agentrig") for name in set(os.listdir("/dev/shm")) - named)
    assert mapped(server.pid) == 1, "the memory is filled again for each version"
    assert mapped(os.getpid()) <= max(kept, 1)


@pytest.mark.slow
def test_the_memory_goes_with_its_server(make_model, tokenizer, tmp_path):
    checkpoint.save(make_model(), tokenizer, tmp_path)
    before = Path("/proc/self/maps").read_text().count("agentrig-weights")
    with embedded(tmp_path, slots=1, max_length=64) as server:
        server.take(checkpoint.weights(make_model(seed=1)), 1)
        assert Path("/proc/self/maps").read_text().count("agentrig-weights") == before + 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads, from Python 3.12 on
            pid = os.fork()
        if not pid:
            os._exit(Path("/proc/self/maps").read_text().count("agentrig-weights"))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "a child does not get it"
    assert Path("/proc/self/maps").read_text().count("agentrig-weights") == before


def test_one_memory_serves_all_versions_and_another_size_brings_another():
    sender, receiver = transfer.Sender(torch.float32, "cpu"), transfer.Receiver("cpu")
    with pytest.raises(ValueError, match="no weights came"):
        receiver.unpack({"tensors": []}, None)
    for version, size in ((1, 100), (2, 100), (3, 300), (4, 300)):
        message, descriptor = sender.pack({"a": torch.full((size,), float(version)), "b": torch.arange(3)})
        assert (descriptor is not None) == (version in (1, 3))
        found = receiver.unpack(json.loads(json.dumps(message)), descriptor)
        assert torch.equal(found["a"], torch.full((size,), float(version)))
        assert torch.equal(found["b"], torch.arange(3))


def test_unpacking_gives_what_was_packed():
    given = {
        "a": torch.randn(3, 5),
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 4),
        "half": torch.randn(7).to(torch.bfloat16),
        "turned": torch.randn(4, 6).T,
        "steps": torch.arange(3),
        "flag": torch.tensor([True, False]),
    }
    for dtype in (torch.float32, torch.bfloat16):
        message, descriptor = transfer.Sender(dtype, "cpu").pack(given)
        found = transfer.Receiver("cpu").unpack(json.loads(json.dumps(message)), descriptor)
        for name, tensor in given.items():
            expected = tensor.to(dtype) if tensor.is_floating_point() else tensor
            assert found[name].dtype == expected.dtype
            assert torch.equal(found[name], expected), name
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_shared_memory_has_no_name_where_the_system_has_no_memfd(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    message, descriptor = transfer.Sender(torch.float32, "cpu").pack({"a": torch.ones(100)})
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(transfer.Receiver("cpu").unpack(message, descriptor)["a"], torch.ones(100))
