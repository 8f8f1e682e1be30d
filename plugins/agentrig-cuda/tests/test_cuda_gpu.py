"""On a host with an NVIDIA GPU: the probe and the doctor describe it correctly, and find planted faults."""

from __future__ import annotations

import shutil

import pytest
from agentrig_cuda import Cuda
from agentrig_cuda.probe import device_files
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
