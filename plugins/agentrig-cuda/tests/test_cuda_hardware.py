import json
import os
import stat
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from agentrig_cuda import Cuda, CudaConfig
from agentrig_cuda.checks import check_flash_attention, check_unwanted_ascend

from agentrig.doctor import Situation
from agentrig.errors import ConfigError
from agentrig.settings import structure
from agentrig.testing import check


def install(folder: Any, name: Any, version: Any, *, entry_points: Any = "", modules: Any = None) -> Any:
    """Put an empty distribution on a path: metadata and modules, as an installer writes them."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if entry_points:
        (info / "entry_points.txt").write_text(entry_points)
    for module, text in (modules or {}).items():
        (folder / f"{module}.py").write_text(text)
    return folder


def test_the_fields_are_separate() -> None:
    cuda = Cuda()
    assert (cuda.name, cuda.torch_device, cuda.verl_platform) == ("cuda", "cuda", "nvidia")
    assert cuda.ray_resource == "GPU"
    assert (cuda.visible_devices, cuda.visible_order) == ("CUDA_VISIBLE_DEVICES", "any")
    assert cuda.dtypes[0] == "bfloat16"


def test_attention_follows_what_is_installed(tmp_path: Any, monkeypatch: Any) -> None:
    assert Cuda().attention[0] == "sdpa"
    monkeypatch.syspath_prepend(install(tmp_path, "flash-attn", "2.8.3"))
    assert Cuda().attention[0] == "flash_attention_2"


def test_attention_can_be_set() -> None:
    assert Cuda(config=CudaConfig(attention="eager")).attention == ("eager",)
    with pytest.raises(ConfigError, match="must be in"):
        structure(CudaConfig, {"attention": "flash"}, owner="cuda", section="hardware")


@pytest.mark.slow
def test_a_flash_attention_that_was_built_for_another_torch_is_explained(tmp_path: Any, monkeypatch: Any) -> None:
    error = "/x/flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEi"
    modules = {"flash_attn_2_cuda": f"raise ImportError({error!r})\n"}
    install(tmp_path, "flash-attn", "2.8.3", modules=modules)
    monkeypatch.syspath_prepend(tmp_path)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    hardware = Cuda()
    situation = Situation(hardware=hardware, candidates=[hardware], versions={"flash-attn": "2.8.3"}, environ=environ)
    (finding,) = check_flash_attention(situation)
    assert finding.result == "problem"
    assert "undefined symbol" in finding.evidence
    assert "built against another torch" in finding.evidence
    assert "--force-reinstall flash-attn" in finding.cure


def test_flash_attention_that_is_asked_for_and_missing_is_a_problem() -> None:
    plan: Any = SimpleNamespace(configs={"hardware": CudaConfig(attention="flash_attention_2")})
    situation = Situation(hardware=Cuda(), plan=plan, versions={})
    (finding,) = check_flash_attention(situation)
    assert finding.result == "problem"


def test_vllm_ascend_beside_cuda_is_found(tmp_path: Any, monkeypatch: Any) -> None:
    points = "[vllm.platform_plugins]\nascend = vllm_ascend:register\n"
    monkeypatch.syspath_prepend(install(tmp_path, "vllm-ascend", "0.10.0rc1", entry_points=points))
    versions = {"vllm-ascend": "0.10.0rc1"}
    (finding,) = check_unwanted_ascend(Situation(hardware=Cuda(), versions=versions, environ={}))
    assert finding.result == "problem"
    assert "would choose the Ascend platform" in finding.evidence
    assert "uninstall" in finding.cure
    (left_out,) = check_unwanted_ascend(Situation(hardware=Cuda(), versions=versions, environ={"VLLM_PLUGINS": ""}))
    assert left_out.result == "ok"


def driver(folder: Any) -> dict[str, str]:
    """Write a stand-in nvidia-smi that lists one GPU; return the environment in which it is found."""
    tool = folder / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-a, NVIDIA H200, 143771, 580.82.07'\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    environ = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    environ.pop("CUDA_VISIBLE_DEVICES", None)
    return environ


def test_the_kit_finds_nothing_wrong_with_a_driver_and_without_one(tmp_path: Any, monkeypatch: Any) -> None:
    check("hardware", "cuda", compute=False)
    environ = driver(tmp_path)
    monkeypatch.setenv("PATH", environ["PATH"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    report = check("hardware", "cuda", compute=False)
    assert [r.check for r in report.results if r.status == "skipped"] == ["hardware.computes"]


@pytest.mark.slow
def test_the_doctor_finds_a_cpu_torch_under_cuda(tmp_path: Any) -> None:
    """The driver answers (a stand-in nvidia-smi on PATH), and the torch at hand is a real one without CUDA."""
    import torch

    if torch.version.cuda:
        pytest.skip("this torch is built for CUDA")
    environ = driver(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "agentrig", "doctor", "--hardware", "cuda", "--json"],
        capture_output=True,
        text=True,
        env=environ,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["could_start"] is False
    found = {f["check"]: f for f in report["findings"]}
    assert found["cuda devices"]["result"] == "ok"
    assert "NVIDIA H200" in found["cuda devices"]["evidence"]
    assert found["torch"]["result"] == "problem"
    assert "(CUDA no" in found["torch"]["evidence"]
    assert "built for CUDA" in found["torch"]["cure"]
