"""Device memory that has run out: known by the text of whoever says so, and said in one message."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from agentrig import device_memory
from agentrig.device_memory import give_memory_back, held_here, out_of_device_memory, shortage
from agentrig.errors import AgentrigError, OutOfMemory, RunStopped, exhausted, memory_named

TORCH = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.18 GiB of which 19.62 MiB is "
    "free. Process 412 has 38.20 GiB memory in use. Including non-PyTorch memory, this process has 40.90 GiB memory in "
    "use. Of the allocated memory 39.10 GiB is allocated by PyTorch, and 1.20 GiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True"
)
ASCEND = (
    "NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 60.97 GiB total capacity; 58.10 GiB already allocated; "
    "58.50 GiB current active; 1.20 GiB free; 59.00 GiB reserved in total by PyTorch)"
)
WORDS = {
    TORCH: "20.0 MiB were asked for; of the device's 79.2 GiB, 19.6 MiB are free, this process holds 40.9 GiB, and "
    "other processes hold 38.3 GiB",
    ASCEND: "2.0 GiB were asked for; of the device's 61.0 GiB, 1.2 GiB are free, this process holds 59.0 GiB, and "
    "other processes hold 0.8 GiB",
    "cuMemAlloc_v2 failed: CUDA_ERROR_OUT_OF_MEMORY (2)": "cuMemAlloc_v2 failed: CUDA_ERROR_OUT_OF_MEMORY (2)",
    "CUDA error: out of memory\nCUDA kernel errors might be reported later": "CUDA error: out of memory",
}


@pytest.mark.parametrize("said", WORDS)
def test_the_text_of_an_error_says_who_holds_what(said: str) -> None:
    assert out_of_device_memory(RuntimeError(said))
    assert shortage(said) == WORDS[said]


def test_other_errors_are_about_another_matter() -> None:
    for error in (MemoryError(), OSError(12, "Cannot allocate memory"), RuntimeError("CUDA error: invalid argument")):
        assert out_of_device_memory(error) == ""
        with pytest.raises(type(error)), memory_named("step 3", "Set less"):
            raise error


def test_a_block_that_runs_out_of_memory_says_what_it_did_and_what_to_set() -> None:
    hidden = ValueError("the optimizer failed")
    hidden.__cause__ = RuntimeError(TORCH)
    with pytest.raises(RunStopped) as caught, memory_named("step 3: the way of the weights", "Set less"):
        raise hidden
    assert str(caught.value) == (
        f"step 3: the way of the weights: the device ran out of memory: {WORDS[TORCH]}\n  Set less"
    )
    assert (type(caught.value), caught.value.cause) == (OutOfMemory, "out-of-memory")
    with pytest.raises(OutOfMemory, match=r"^step 3: the way"), memory_named("the run has ended", "Set more"):
        raise caught.value
    with pytest.raises(AgentrigError, match=r"^no such"), memory_named("the run has ended", "Set more"):
        raise AgentrigError("no such CUDA out of memory")


def test_a_command_names_the_device_and_not_the_machine() -> None:
    assert exhausted(RuntimeError(TORCH)).startswith(f"the device ran out of memory: {WORDS[TORCH]}. Use a smaller")
    assert exhausted(MemoryError("cannot allocate memory")).startswith("this machine has too little memory")


def test_memory_is_given_back_on_devices_that_have_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    called = []

    class Module:
        is_available = staticmethod(lambda: True)
        empty_cache = staticmethod(lambda: called.append("empty_cache"))

    monkeypatch.setattr(torch, "get_device_module", lambda kind: called.append(kind) or Module)
    give_memory_back("cpu")
    assert called == []
    give_memory_back(torch.device("cuda", 0))
    assert called[-1] == "empty_cache"
    assert set(called[:-1]) == {"cuda"}


@pytest.mark.parametrize(
    ("on_host", "counted", "held"),
    [(True, 9, 9), (True, None, 5.5), (True, 3, 4), (False, 9, 5.5)],
    ids=["by nvml", "nvml has no number", "nvml lags", "a container"],
)
def test_what_a_process_holds_is_counted_by_nvml_or_by_torch(monkeypatch, tmp_path, on_host, counted, held) -> None:
    torch = pytest.importorskip("torch")
    assert held_here("cpu") is None
    gib = 1 << 30
    others = SimpleNamespace(pid=os.getpid() + 1, usedGpuMemory=40 * gib)
    own = SimpleNamespace(pid=os.getpid(), usedGpuMemory=counted and counted * gib)
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID={"GPU-a-b": "the card"}.__getitem__,
        nvmlDeviceGetComputeRunningProcesses={"the card": [others, own]}.__getitem__,
        NVMLError=RuntimeError,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    namespace = os.stat("/proc/self/ns/pid").st_ino
    monkeypatch.setattr(device_memory, "HOST_PIDS", namespace if on_host else namespace + 1)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 4 * gib)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a-b"))
    assert held_here("cuda:0") == held * gib
