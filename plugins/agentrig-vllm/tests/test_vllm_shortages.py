"""Memory that is too small for vLLM: one message with the setting that helps."""

from __future__ import annotations

import pytest
from agentrig_vllm.shortages import shortage_in

from agentrig.errors import OutOfMemory
from agentrig.processes.servers import ServerError

CORE = "(EngineCore_DP0 pid=4711) ERROR 11-24 10:00:00 [core.py:936] "

SAYS = {
    "another process holds the card": (
        "ValueError: Free memory on device cuda:0 (16.07/79.18 GiB) on startup is less than desired GPU memory "
        "utilization (0.4, 31.67 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
        "it asks for 31.7 GiB of the device's 79.2 GiB (server.gpu_memory_utilization = 0.4), and 16.1 GiB are free: "
        "other processes hold 63.1 GiB, the run's learner among them",
        "Set server.gpu_memory_utilization = 0.19, or end the other processes on the device",
    ),
    "other people's server takes 90%, and 2 GiB are free": (
        "ValueError: Free memory on device cuda:0 (2.01/79.18 GiB) on startup is less than desired GPU memory "
        "utilization (0.4, 31.67 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
        "it asks for 31.7 GiB of the device's 79.2 GiB (server.gpu_memory_utilization = 0.4), and 2.0 GiB are free: "
        "other processes hold 77.2 GiB, the run's learner among them",
        "End the other processes on the device, or use another device (server.device)",
    ),
    "a MIG slice, by the former words": (
        "ValueError: Free memory on device (9.50/9.75 GiB) on startup is less than desired GPU memory utilization "
        "(0.98, 9.56 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
        "it asks for 9.6 GiB of the device's 9.8 GiB (server.gpu_memory_utilization = 0.98), and 9.5 GiB are free: "
        "other processes hold 0.2 GiB, the run's learner among them",
        "Set server.gpu_memory_utilization = 0.96, or end the other processes on the device",
    ),
    "one long request": (
        "ValueError: To serve at least one request with the model's max seq len (32768), (4.38 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (0.85 GiB). Based on the available memory, the "
        "estimated maximum model length is 6352. Try increasing `gpu_memory_utilization` or decreasing "
        "`max_model_len` when initializing the engine.",
        "the keys and values of one request of 32768 tokens need 4.38 GiB, and the server's share leaves 0.85 GiB for "
        "them beside its weights",
        "Set algorithm.max_length = 6352, or a larger server.gpu_memory_utilization",
    ),
    "one long request, no length fits": (
        "ValueError: To serve at least one request with the models's max seq len (4096), 0.11 GiB KV cache is needed, "
        "which is larger than the available KV cache memory (-0.30 GiB). Try increasing `gpu_memory_utilization` or "
        "decreasing `max_model_len` when initializing the engine.",
        "the keys and values of one request of 4096 tokens need 0.11 GiB, and the server's share leaves -0.30 GiB for "
        "them beside its weights",
        "Set a larger server.gpu_memory_utilization",
    ),
    "few tokens": (
        "ValueError: The model's max seq len (32768) is larger than the maximum number of tokens that can be stored in "
        "KV cache (11184). Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing "
        "the engine.",
        "its memory for keys and values holds 11184 tokens, and one request may have 32768",
        "Set algorithm.max_length = 11184, or a larger server.gpu_memory_utilization",
    ),
    "weights fill the share": (
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
        "initializing the engine.",
        "the server's share of the device leaves no memory for keys and values beside its weights",
        "Set a larger server.gpu_memory_utilization",
    ),
    "torch": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.90 GiB. GPU 0 has a total capacity of 79.18 "
        "GiB of which 127.00 MiB is free. Process 77 has 38.50 GiB memory in use. Including non-PyTorch memory, this "
        "process has 40.55 GiB memory in use. Of the allocated memory 39.10 GiB is allocated by PyTorch, and 0.90 GiB "
        "is reserved by PyTorch but unallocated.",
        "its device ran out of memory: 2.9 GiB were asked for; of the device's 79.2 GiB, 0.1 GiB are free, the server "
        "holds 40.5 GiB, and other processes hold 38.5 GiB",
        "Set server.max_num_seqs lower, end the other processes on the device, or serve a smaller model",
    ),
}


@pytest.mark.parametrize("kind", SAYS)
def test_what_vllm_says_becomes_one_message_with_a_setting(kind: str) -> None:
    said, reason, cure = SAYS[kind]
    before = [f"{CORE}EngineCore failed to start.", f"{CORE}Traceback (most recent call last):", f"{CORE}  File x"]
    after = ["RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"]
    found = shortage_in("\n".join([*before, CORE + said, *after]), started=False)
    assert found == f"{reason}\n  {cure}"


def test_errors_about_another_matter_are_left_alone() -> None:
    for said in (
        "ValueError: The model's max seq len must be positive",
        "MemoryError: cannot allocate memory",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "INFO Available KV cache memory: 12.2 GiB",
    ):
        assert shortage_in(said, started=False) == ""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["another process holds the card", "few tokens", "torch"])
def test_a_start_without_memory_gives_no_traceback_and_names_the_log(server, tmp_path, monkeypatch, kind) -> None:
    said, reason, cure = SAYS[kind]
    monkeypatch.setenv("STAND_IN_FAILS", f"says {said.partition(': ')[2] if kind != 'torch' else said}")
    log = tmp_path / "server.log"
    log.write_text("ValueError: No available memory for the cache blocks. (of an earlier launch)\n")
    with pytest.raises(ServerError) as caught, server() as made:
        _ = made.endpoints
    assert str(caught.value) == f"the vLLM server could not start: {reason}\n  {cure}\n  its log: {log}"
    assert isinstance(caught.value, OutOfMemory)
    assert caught.value.cause == "out-of-memory"
    with pytest.raises(OutOfMemory, match="could not answer"):
        made.check()
    assert "Traceback" in log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("tag", "what"), [("weights", "wake"), ("kv_cache", "take the weights of version 2")])
def test_a_server_that_cannot_wake_says_what_to_set(server, model, monkeypatch, tag, what) -> None:
    state = dict(model.state_dict())
    del state["lm_head.weight"]
    monkeypatch.setenv("STAND_IN_CANNOT_WAKE", tag)
    with server() as made:
        made.take(state.items(), 1)
        made.sleep()
        if tag == "kv_cache":
            made.wake()
        words = rf"^the vLLM server could not {what}: its device ran out of memory: "
        with pytest.raises(OutOfMemory, match=words) as caught:
            made.wake() if tag == "weights" else made.take(state.items(), 2)
        assert "lower algorithm.tokens_per_batch" in str(caught.value)
        assert "Traceback" not in str(caught.value)
