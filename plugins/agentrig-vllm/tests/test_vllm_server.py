"""The server's two processes and their messages, with a stand-in for vLLM itself."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import attrs
import httpx
import psutil
import pytest
import torch
from doors import Door, problems

from agentrig.delivery.digests import digests
from agentrig.processes.servers import ServerError
from agentrig.servers import Measuring


@pytest.mark.slow
def test_the_door_is_closed_to_what_is_no_request(server):
    with server() as running:
        endpoint = running.endpoints[0]
        port, key = urlsplit(endpoint.base_url).port, f"Authorization: Bearer {endpoint.api_key}"
        assert problems(Door(port=port, path="/v1/chat/completions", header=key)) == []
        assert ask(running, key="wrong").status_code == 401


def weights(model):
    state = dict(model.state_dict())
    del state["lm_head.weight"]  # tied
    return state


def ask(server, path="/v1/completions", *, key=None, number=0):
    endpoint = server.endpoints[number]
    headers = {"Authorization": f"Bearer {endpoint.api_key if key is None else key}"}
    return httpx.post(endpoint.base_url.removesuffix("/v1") + path, headers=headers, json={}, timeout=30)


def family(server):
    return [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]


def gone(processes, timeout=10):
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
            return True
        time.sleep(0.05)
    return False


def check_for(server, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        server.check()
        time.sleep(0.01)


@pytest.mark.parametrize("chunk_mb", [1, pytest.param(512, marks=pytest.mark.slow)])
def test_new_weights_arrive_bit_by_bit_and_their_version_is_in_the_answers(server, model, chunk_mb, monkeypatch):
    from agentrig_vllm import transfer

    state = weights(model)
    with server(chunk_mb=chunk_mb) as made:
        assert made.held() is None
        if chunk_mb == 1:
            made._sender = transfer.Sender(torch.bfloat16, 1024)  # several messages, and tensors larger than the buffer
        for version in (3, 4):
            changed = {name: tensor * (version + 0.1) for name, tensor in state.items()}
            made.take(iter(changed.items()), version)
            assert made.held() == [digests(changed.items(), torch.bfloat16)]
            body = ask(made).json()
            assert (body["model"], body["system_fingerprint"]) == ("policy", f"v{version}")
        messages = body["calls"].count("agentrig_load")
        assert messages > 10 if chunk_mb == 1 else messages == 2
        order = [call for call in body["calls"] if call not in ("agentrig_load", "agentrig_held")]
        once = ["pause wait False", "agentrig_begin", "agentrig_missing", "reset_prefix_cache", "resume"]
        assert order == once * 2
        assert (made.context, made.dtype) == (48, "bfloat16")


def test_vllms_worker_says_what_it_holds_of_the_learners_gpu(server, monkeypatch):
    with server() as made:
        assert made.device_memory() is None, "nothing is counted on a CPU"
    monkeypatch.setenv("STAND_IN_HOLDS", str(21 << 30))
    with server() as made:
        assert isinstance(made, Measuring)
        assert made.device_memory() == 21 << 30
        made._config = attrs.evolve(made._config, device=1)
        assert made.device_memory() == 0, "it computes on another GPU"


def adapters(model, rank, seed):
    torch.manual_seed(seed)
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    found = {}
    for name in (name for name in linear if name != "lm_head"):
        rows, width = model.get_submodule(name).weight.shape
        found[f"{name}.lora_A.weight"] = torch.randn(rank, width, dtype=torch.bfloat16)
        found[f"{name}.lora_B.weight"] = torch.randn(rows, rank, dtype=torch.bfloat16)
    return found


def test_vllms_weights_are_lent_and_adapters_arrive_beside_them_bit_by_bit(server, model):
    own = {name: tensor.detach().bfloat16() for name, tensor in model.named_parameters()}
    with server(sleeps=False, adapters=3) as made:
        body = ask(made).json()
        assert (body["adapter"], body["calls"]) == (1, []), "requests name the run's adapters from the start"
        lent = made.lend({name: list(tensor.shape) for name, tensor in own.items()})
        assert lent.keys() == own.keys()
        assert all(lent[name].dtype == torch.bfloat16 and torch.equal(lent[name], own[name]) for name in own)
        assert made.held() is None
        for version in (1, 2):
            sent = adapters(model, 3, version)
            made.take(iter(sent.items()), version)
            assert made.held() == [{**digests(own.items()), **digests(sent.items())}]
        fewer = {name: tensor for name, tensor in sent.items() if ".k_proj." not in name}
        made.take(iter(fewer.items()), 3)
        assert made.held() == [{**digests(own.items()), **digests(fewer.items())}]
        assert made._sender.shapes.keys() == fewer.keys()
        body = ask(made).json()
        assert (body["calls"].count("agentrig_load"), body["system_fingerprint"]) == (3, "v3")
        strange = {"lm_head.lora_A.weight": torch.ones(3, 16)}
        with pytest.raises(ServerError, match=r"no place for 1 adapters: lm_head\.lora_A\.weight"):
            made.take(iter({**sent, **strange}.items()), 4)
        assert ask(made).status_code == 503, "nothing is answered with half of them"
        (counter,) = made._counters
        assert counter.is_file()
    assert not counter.exists(), "torch's count of who uses the memory, which a killed process leaves"


def test_weights_that_cannot_be_read_from_outside_name_the_setting(server, model, monkeypatch):
    from agentrig_vllm import transfer

    def refused(message, device):
        raise RuntimeError("CUDA error: invalid resource handle")

    with server(sleeps=False, adapters=3) as made:
        monkeypatch.setattr(transfer, "opened", refused)
        with pytest.raises(ServerError, match=r"lend .*invalid resource handle\n.*lora_base = \"own\""):
            made.lend({"model.norm.weight": [16]})


def test_wrong_weights_are_refused_and_nothing_is_answered_with_half_of_them(server, model):
    state = weights(model)
    with server() as made:
        made.take(state.items(), 1)
        name = "model.layers.1.self_attn.q_proj.weight"
        with pytest.raises(ServerError, match=f"not finite: {name}"):
            made.take({**state, name: state[name] * float("nan")}.items(), 2)
        refused = ask(made)
        assert (refused.status_code, refused.json()["error"]["message"]) == (503, "the server takes new weights")
        with pytest.raises(ServerError, match=r"lack 1 tensors of the model: model\.norm\.weight"):
            made.take({k: v for k, v in state.items() if k != "model.norm.weight"}.items(), 2)
        with pytest.raises(ServerError, match=r"could not take the weights of version 2: .*(size|shape)"):
            made.take({**state, "model.norm.weight": torch.ones(3)}.items(), 2)
        assert ask(made).status_code == 503
        made.take(state.items(), 5)
        assert ask(made).json()["system_fingerprint"] == "v5"


@pytest.mark.slow
def test_a_sleeping_server_refuses_and_an_awake_one_waits_for_weights(server, model):
    with server() as made:
        made.take(weights(model).items(), 1)
        made.sleep()
        assert "sleeps" in ask(made).json()["error"]["message"]
        with pytest.raises(ServerError, match="wake it first"):
            made.take(weights(model).items(), 2)
        made.wake()
        refused = ask(made)
        assert (refused.status_code, "no weights" in refused.text) == (503, True)
        made.take(weights(model).items(), 2)
        answer = ask(made)
        assert answer.status_code == 200
        assert [call for call in answer.json()["calls"] if "sleep" in call or "wake" in call] == [
            "sleep 2 wait",
            "wake_up weights",
            "wake_up kv_cache",
        ]
        made.take(weights(model).items(), 3)  # nothing is asleep any more
        assert [call for call in ask(made).json()["calls"] if "wake" in call][2:] == []
        for version in (4, 5):
            made.sleep()
            made.wake()
            made.take(weights(model).items(), version)
            assert ask(made).json()["system_fingerprint"] == f"v{version}"
        order = ask(made).json()["calls"]
        assert order.index("wake_up weights") < order.index("agentrig_load", order.index("sleep 2 wait"))
        assert order[order.index("wake_up kv_cache") + 1] == "reset_prefix_cache"


@pytest.mark.slow
def test_several_processes_answer_for_one_engine_and_one_version(server, model):
    state = weights(model)
    with server(api_server_count=3) as made:
        everywhere = range(len(made.endpoints))
        assert len({endpoint.base_url for endpoint in made.endpoints}) == 3
        for version in (1, 2):
            changed = {name: tensor * (version + 0.1) for name, tensor in state.items()}
            made.take(iter(changed.items()), version)
            assert made.held() == [digests(changed.items(), torch.bfloat16)] * 3
            answers = [ask(made, number=i).json() for i in everywhere]
            assert [answer["system_fingerprint"] for answer in answers] == [f"v{version}"] * 3
            assert [bool(answer["calls"]) for answer in answers] == [True, False, False]
        assert [ask(made, number=i, key="guessed").status_code for i in everywhere] == [401] * 3
        with pytest.raises(ServerError, match="lack"):
            made.take({k: v for k, v in state.items() if k != "model.norm.weight"}.items(), 3)
        assert {ask(made, number=i).json()["error"]["message"] for i in everywhere} == {"the server takes new weights"}
        made.sleep()
        assert all("sleeps" in ask(made, number=i).text for i in everywhere)
        made.wake()
        assert all("no weights" in ask(made, number=i).text for i in everywhere)
        made.take(state.items(), 3)
        assert [ask(made, number=i).json()["system_fingerprint"] for i in everywhere] == ["v3"] * 3
        several = family(made)
        assert len(several) == 4  # the first process, the engine, and two more that answer
    assert gone(several)


@pytest.mark.slow
def test_the_end_of_one_of_several_processes_ends_the_server(server, model):
    with server(api_server_count=2) as made:
        made.take(weights(model).items(), 1)
        several = family(made)
        ports = {int(endpoint.base_url.rsplit(":", 1)[1].split("/")[0]) for endpoint in made.endpoints}
        (beside,) = [
            process
            for process in several[1:]
            if ports & {connection.laddr.port for connection in process.net_connections() if connection.laddr}
        ]
        beside.kill()
        with pytest.raises(ServerError, match="has died"):
            check_for(made, 5)
        assert gone(several)


def test_processes_are_as_many_as_asked_for_or_as_the_cores_allow(monkeypatch):
    from agentrig_vllm import api_server_process

    for cores, expected in ((2, 1), (11, 1), (14, 2), (23, 3), (128, 4)):
        monkeypatch.setattr(api_server_process, "usable_cores", lambda cores=cores: cores)
        assert api_server_process.processes(0) == expected
        assert api_server_process.processes(7) == 7


def test_a_tokenizer_that_vllm_replaces_is_named(server, model, tmp_path, caplog):
    from agentrig_grpo.naming import model_directory
    from tokenizers import Regex, Tokenizer, pre_tokenizers

    made = server()
    made._plan = attrs.evolve(made._plan, model=tmp_path)
    for file in (*model_directory("mini").iterdir(), *model.directory.iterdir()):
        shutil.copy(file, tmp_path / file.name)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    split = pre_tokenizers.Split(Regex(r" ?[A-Za-z]+?|\s|."), "isolated")
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytewise])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with caplog.at_level("WARNING"), made:
        assert f"vLLM tokenizes text differently from {tmp_path}" in caplog.text


@pytest.mark.slow
def test_only_the_run_itself_is_answered(server):
    with server() as made:
        for path in ("/v1/completions", "/tokenize", "/sleep", "/collective_rpc"):
            assert httpx.post(made.endpoints[0].base_url.removesuffix("/v1") + path).status_code == 401
            assert ask(made, path, key="guessed").status_code == 401
        assert ask(made, "/tokenize").status_code == 200
        assert httpx.get(made.endpoints[0].base_url.removesuffix("/v1") + "/health").status_code == 200
        command = " ".join(psutil.Process(made.pid).cmdline())
        assert made.endpoints[0].api_key not in command
        assert made.endpoints[0].base_url.startswith("http://127.0.0.1:")


@pytest.mark.slow
def test_address_and_buffer_are_those_of_the_settings(server, model):
    with socket.create_server(("127.0.0.2", 0)) as probe:
        port = probe.getsockname()[1]
    with server(host="127.0.0.2", port=port, chunk_mb=2) as made:
        made.take(weights(model).items(), 1)
        assert made.endpoints[0].base_url == f"http://127.0.0.2:{port}/v1"
        assert ask(made).status_code == 200
        assert made._sender._buffer.numel() == 2 << 20


@pytest.mark.slow
def test_it_starts_while_the_run_does_something_else(server):
    with server() as made:
        assert made._ready is None
        assert psutil.pid_exists(made.pid)
        assert made.endpoints[0].token_ids
        assert set(made.parts) == {"import", "configure", "engine", "http"}
        made.check()


@pytest.mark.parametrize("fails", [pytest.param("configure", marks=pytest.mark.slow), "load"])
def test_the_error_of_a_server_that_cannot_start_has_the_reason(server, monkeypatch, fails):
    monkeypatch.setenv("STAND_IN_FAILS", fails)
    with server() as made:
        processes = family(made)
        why = {
            "configure": r"has died, asked to start \(exit status 1\): ValueError: max_model_len is larger",
            "load": r"could not start: its device ran out of memory: .*MemoryError: CUDA out of memory\n  Set server\.",
        }
        with pytest.raises(ServerError, match=why[fails]):
            _ = made.endpoints
        assert gone(processes)


@pytest.mark.slow
def test_a_server_that_starts_too_slowly_is_ended_with_its_children(server, monkeypatch):
    monkeypatch.setenv("STAND_IN_FAILS", "hang")
    with server(start_s=8.0) as made:
        while len(family(made)) < 2:
            time.sleep(0.05)
        processes = family(made)
        with pytest.raises(ServerError, match="did not start within"):
            _ = made.context
        assert gone(processes)


@pytest.mark.slow
def test_a_dead_engine_is_named_at_once(server, model):
    with server() as made:
        made.take(weights(model).items(), 1)
        processes = family(made)
        os.kill(processes[1].pid, signal.SIGKILL)
        assert gone(processes[1:])
        with pytest.raises(ServerError, match="the vLLM server"):
            check_for(made, seconds=5)  # the kernel takes some milliseconds to end all threads of a process
        with pytest.raises(ServerError, match=r"the vLLM server (has died|could not)"):
            made.take(weights(model).items(), 2)
        assert gone(processes)


@pytest.mark.slow
def test_the_engine_of_a_killed_server_ends(server, model):
    with server() as made:
        made.take(weights(model).items(), 1)
        processes = family(made)
        assert len(processes) == 2
        os.kill(made.pid, signal.SIGKILL)
        assert gone(processes), "the engine would keep the GPU's memory"
        with pytest.raises(ServerError, match=r"has died.*\(killed by SIGKILL\)") as caught:
            made.check()
        assert f"its log: {made._plan.log}" in str(caught.value)


RUN = """
import sys, time
from pathlib import Path
from urllib.parse import urlsplit
from agentrig.hardware.cpu import Cpu
from agentrig.servers import ServerPlan
from agentrig_vllm.config import VllmConfig
from agentrig_vllm.handle import VllmServer
plan = ServerPlan(model=Path(sys.argv[1]), name="policy", hardware=Cpu(), log=Path(sys.argv[2]))
with VllmServer(plan, VllmConfig()) as server:
    if sys.argv[3] == "ready":
        server.endpoints
    print(server.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("when", [pytest.param("starting", marks=pytest.mark.slow), "ready"])
def test_a_killed_run_leaves_no_server(stand_in, model, tmp_path: Path, when: str, monkeypatch):
    command = [sys.executable, "-c", RUN, str(model.directory), str(tmp_path / "log"), when]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        pid = int(run.stdout.readline())
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        run.kill()
    assert gone(processes, timeout=30)
