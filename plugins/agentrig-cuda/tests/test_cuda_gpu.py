"""On a host with an NVIDIA GPU: the probe and the doctor describe it correctly, and find planted faults."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from agentrig_cuda import Cuda
from agentrig_cuda.probe import device_files
from distributions import describe
from hosts import doctor

# A host with a broken driver must fail and not be skipped.
HINTS = bool(device_files()) or shutil.which("nvidia-smi") is not None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HINTS, reason="needs an NVIDIA GPU")]


def test_the_probe_says_what_torch_says() -> None:
    import torch

    probe = Cuda().probe()
    assert probe.available
    assert probe.problems == ()
    assert len(probe.devices) == torch.cuda.device_count()
    for index, device in enumerate(probe.devices):
        properties = torch.cuda.get_device_properties(index)
        assert device.name == properties.name
        # The driver counts reserved memory, torch does not.
        assert device.memory is not None
        assert 0 <= device.memory - properties.total_memory < 0.05 * device.memory


def test_the_doctor_selects_the_gpu() -> None:
    _, found = doctor("mini")
    assert found["cuda devices"]["result"] == "ok"
    assert found["cuda devices"]["evidence"].startswith("used")
    assert found["torch"]["result"] == "ok"
    assert "can use cuda" in found["torch"]["evidence"]
    assert found["memory"]["result"] == "ok"


def test_the_reference_model_fits() -> None:
    _, found = doctor("fast", "tasks.use=mini-sql", "--hardware", "cuda")
    assert found["memory"]["result"] in ("ok", "warning")
    assert "weights" in found["memory"]["evidence"]


def test_a_gpu_that_is_not_here_is_found() -> None:
    status, found = doctor("mini", "--hardware", "cuda", CUDA_VISIBLE_DEVICES="99")
    assert status == 1
    assert found["cuda devices"]["result"] == "problem"
    assert "names a GPU that is not here" in found["cuda devices"]["evidence"]


def test_hidden_gpus_leave_the_cpu() -> None:
    _, found = doctor("mini", CUDA_VISIBLE_DEVICES="")
    assert found["cuda devices"]["evidence"].startswith("none here")
    assert found["cpu devices"]["evidence"].startswith("used")


def test_vllm_ascend_beside_cuda_is_found(tmp_path: Path) -> None:
    describe(tmp_path, "vllm-ascend", "0.18.0", points="[vllm.platform_plugins]\nascend = vllm_ascend:register\n")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    status, found = doctor("mini", "--hardware", "cuda", PYTHONPATH=path)
    assert status == 1
    assert found["vllm platform"]["result"] == "problem"
