from typing import Any

import pytest
from agentrig_cuda.probe import device_files, parse_smi, probe, visible
from hosts import tool

TWO = """\
0, GPU-aaaa, NVIDIA H200, 143771, 580.82.07
1, GPU-bbbb, NVIDIA H200, 143771, 580.82.07
"""


@pytest.fixture
def host(tmp_path: Any) -> Any:
    """A host with its own /dev and PATH; `host(smi=...)` adds an nvidia-smi."""

    def make(*, files: Any = (), smi: Any = None, status: Any = 0, **environ: Any) -> Any:
        dev, path = tmp_path / "dev", tmp_path / "bin"
        dev.mkdir(exist_ok=True)
        path.mkdir(exist_ok=True)
        for name in files:
            (dev / name).touch()
        if smi is not None:
            tool(path, "nvidia-smi", smi, status=status, channel=" >&2" if status else "")
        return probe({"PATH": str(path), **environ}, dev)

    return make


def test_two_gpus_are_listed_with_their_memory(host: Any) -> None:
    found = host(files=("nvidia0", "nvidia1", "nvidiactl"), smi=TWO)
    assert found.available
    assert [(d.name, d.memory) for d in found.devices] == [("NVIDIA H200", 143771 * 2**20)] * 2
    assert "driver 580.82.07" in found.evidence


FAILS = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n"
HOSTS: dict[str, tuple[dict[str, Any], int, str, str]] = {
    "no GPU": ({}, 0, "", "not on PATH"),
    "a driver that does not answer": ({"smi": FAILS, "status": 9}, 0, "couldn't communicate", "load the kernel module"),
    "device files without a driver": ({"files": ("nvidia0",)}, 0, "--gpus all", ""),
    "hidden GPUs": ({"files": ("nvidia0",), "smi": TWO, "CUDA_VISIBLE_DEVICES": ""}, 0, "", "shows 0 of 2"),
    "a GPU that is not here": ({"smi": TWO, "CUDA_VISIBLE_DEVICES": "1,7"}, 1, "use ids from 0 to 1", ""),
}
"""A host, how many GPUs can be used, what its problem says ('' for none), and what else is said."""


@pytest.mark.parametrize("name", HOSTS)
def test_what_is_wrong_with_a_host_is_said(host: Any, name: str) -> None:
    given, devices, problem, more = HOSTS[name]
    found = host(**given)
    assert (found.available, len(found.devices) if found.available else 0) == (devices > 0, devices)
    assert bool(found.problems) == bool(problem)
    assert problem in "".join(found.problems)
    assert more in " ".join((*found.problems, *found.evidence))


def test_control_files_are_no_devices(tmp_path: Any) -> None:
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-modeset", "nvidia3"):
        (tmp_path / name).touch()
    assert device_files(tmp_path) == [str(tmp_path / "nvidia3")]


def test_visibility_is_read_as_cuda_reads_it() -> None:
    gpus = parse_smi(TWO)
    assert [g.index for g in visible(gpus, "1,0")] == [1, 0]
    assert [g.index for g in visible(gpus, "0,9,1")] == [0]
    assert [g.index for g in visible(gpus, "GPU-bb")] == [1]
    assert visible(gpus, "-1") == []
    assert visible(gpus, None) == gpus


@pytest.mark.parametrize("name", ["MIG-8f1a-22", "MIG-GPU-aaaa/1/0"])
def test_a_slice_has_not_the_memory_of_its_card(host: Any, name: str) -> None:
    found = host(smi=TWO, CUDA_VISIBLE_DEVICES=name)
    assert [(d.name, d.memory) for d in found.devices] == [("NVIDIA H200", None)]
    assert "the memory of a MIG slice is known to the driver only" in found.evidence


def test_unknown_memory_is_none() -> None:
    assert parse_smi("0, GPU-a, NVIDIA GB10, [N/A], 580.1\n")[0].memory is None
