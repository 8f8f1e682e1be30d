import stat
from typing import Any

import pytest
from agentrig_cuda.probe import device_files, parse_smi, probe, visible

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
            tool = path / "nvidia-smi"
            channel = "" if status == 0 else " >&2"
            tool.write_text(f"#!/bin/sh\n/bin/cat <<'END'{channel}\n{smi}END\nexit {status}\n")
            tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        return probe({"PATH": str(path), **environ}, dev)

    return make


def test_a_host_without_gpus_has_no_problem(host: Any) -> None:
    found = host()
    assert not found.available
    assert found.problems == ()
    assert "not on PATH" in found.evidence[1]


def test_two_gpus_are_listed_with_their_memory(host: Any) -> None:
    found = host(files=("nvidia0", "nvidia1", "nvidiactl"), smi=TWO)
    assert found.available
    assert [d.name for d in found.devices] == ["NVIDIA H200", "NVIDIA H200"]
    assert found.devices[0].memory == 143771 * 2**20
    assert "driver 580.82.07" in found.evidence


def test_control_files_are_no_devices(tmp_path: Any) -> None:
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-modeset", "nvidia3"):
        (tmp_path / name).touch()
    assert device_files(tmp_path) == [str(tmp_path / "nvidia3")]


def test_a_driver_that_does_not_answer_is_broken(host: Any) -> None:
    failure = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n"
    found = host(smi=failure, status=9)
    assert not found.available
    assert "couldn't communicate" in found.problems[0]
    assert "load the kernel module" in found.problems[0]


def test_device_files_without_a_driver_are_broken(host: Any) -> None:
    found = host(files=("nvidia0",))
    assert not found.available
    assert "--gpus all" in found.problems[0]


def test_hidden_gpus_are_not_available_and_no_problem(host: Any) -> None:
    found = host(files=("nvidia0",), smi=TWO, CUDA_VISIBLE_DEVICES="")
    assert not found.available
    assert found.problems == ()
    assert "shows 0 of 2" in found.evidence[-1]


def test_a_gpu_that_is_not_here_is_named(host: Any) -> None:
    found = host(smi=TWO, CUDA_VISIBLE_DEVICES="1,7")
    assert found.available
    assert len(found.devices) == 1
    assert "use ids from 0 to 1" in found.problems[0]


def test_visibility_is_read_as_cuda_reads_it() -> None:
    gpus = parse_smi(TWO)
    assert [g.index for g in visible(gpus, "1,0")] == [1, 0]
    assert [g.index for g in visible(gpus, "0,9,1")] == [0]
    assert [g.index for g in visible(gpus, "GPU-bb")] == [1]
    assert visible(gpus, "-1") == []
    assert visible(gpus, None) == gpus


def test_unknown_memory_is_none() -> None:
    assert parse_smi("0, GPU-a, NVIDIA GB10, [N/A], 580.1\n")[0].memory is None
