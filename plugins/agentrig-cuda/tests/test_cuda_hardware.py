import os
from types import SimpleNamespace
from typing import Any

import pytest
from agentrig_cuda import Cuda, CudaConfig
from agentrig_cuda.checks import check_flash_attention, check_unwanted_ascend
from distributions import describe
from hosts import ONE_GPU, doctor, only, tool

from agentrig.doctor import Situation
from agentrig.errors import ConfigError
from agentrig.settings import structure
from agentrig.testing import check


def test_the_fields_are_separate() -> None:
    cuda = Cuda()
    assert (cuda.name, cuda.torch_device, cuda.verl_platform) == ("cuda", "cuda", "nvidia")
    assert cuda.ray_resource == "GPU"
    assert (cuda.visible_devices, cuda.visible_order) == ("CUDA_VISIBLE_DEVICES", "any")
    assert cuda.dtypes[0] == "bfloat16"


def test_attention_follows_what_is_installed(tmp_path: Any, monkeypatch: Any) -> None:
    assert Cuda().attention[0] == "sdpa"
    monkeypatch.syspath_prepend(describe(tmp_path, "flash-attn", "2.8.3"))
    assert Cuda().attention[0] == "flash_attention_2"


def test_attention_can_be_set() -> None:
    assert Cuda(config=CudaConfig(attention="eager")).attention == ("eager",)
    with pytest.raises(ConfigError, match="must be in"):
        structure(CudaConfig, {"attention": "flash"}, owner="cuda", section="hardware")


@pytest.mark.slow
def test_a_flash_attention_that_was_built_for_another_torch_is_explained(tmp_path: Any, monkeypatch: Any) -> None:
    error = "/x/flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEi"
    describe(tmp_path, "flash-attn", "2.8.3")
    (tmp_path / "flash_attn_2_cuda.py").write_text(f"raise ImportError({error!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    hardware = Cuda()
    situation = Situation(hardware=hardware, candidates=[hardware], versions={"flash-attn": "2.8.3"}, environ=environ)
    finding = only(check_flash_attention(situation), "problem")
    assert "undefined symbol" in finding.evidence
    assert "built against another torch" in finding.evidence
    assert "--force-reinstall flash-attn" in finding.cure


def test_flash_attention_that_is_asked_for_and_missing_is_a_problem() -> None:
    plan: Any = SimpleNamespace(configs={"hardware": CudaConfig(attention="flash_attention_2")})
    situation = Situation(hardware=Cuda(), plan=plan, versions={})
    only(check_flash_attention(situation), "problem")


def test_vllm_ascend_beside_cuda_is_found(tmp_path: Any, monkeypatch: Any) -> None:
    points = "[vllm.platform_plugins]\nascend = vllm_ascend:register\n"
    monkeypatch.syspath_prepend(describe(tmp_path, "vllm-ascend", "0.10.0rc1", points=points))
    versions = {"vllm-ascend": "0.10.0rc1"}
    finding = only(check_unwanted_ascend(Situation(hardware=Cuda(), versions=versions, environ={})), "problem")
    assert "would choose the Ascend platform" in finding.evidence
    assert "uninstall" in finding.cure
    only(check_unwanted_ascend(Situation(hardware=Cuda(), versions=versions, environ={"VLLM_PLUGINS": ""})), "ok")


def test_the_kit_finds_nothing_wrong_with_a_driver_and_without_one(tmp_path: Any, monkeypatch: Any) -> None:
    check("hardware", "cuda", compute=False)
    monkeypatch.setenv("PATH", tool(tmp_path, "nvidia-smi", ONE_GPU))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    report = check("hardware", "cuda", compute=False)
    assert [r.check for r in report.results if r.status == "skipped"] == ["hardware.computes"]


@pytest.mark.slow
def test_the_doctor_finds_a_cpu_torch_under_cuda(tmp_path: Any, monkeypatch: Any) -> None:
    """The driver answers (a stand-in nvidia-smi on PATH), and the torch at hand is a real one without CUDA."""
    import torch

    if torch.version.cuda:
        pytest.skip("this torch is built for CUDA")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    status, found = doctor("--hardware", "cuda", PATH=tool(tmp_path, "nvidia-smi", ONE_GPU))
    assert status == 1
    assert found["cuda devices"]["result"] == "ok"
    assert "NVIDIA H200" in found["cuda devices"]["evidence"]
    assert found["torch"]["result"] == "problem"
    assert "(CUDA no" in found["torch"]["evidence"]
    assert "built for CUDA" in found["torch"]["cure"]
