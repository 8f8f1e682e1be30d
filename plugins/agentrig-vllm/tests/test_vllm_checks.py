"""Where vLLM can serve, and the doctor's findings about it."""

from __future__ import annotations

from pathlib import Path

import pytest
from agentrig_cuda.hardware import Cuda
from agentrig_vllm import checks

from agentrig.findings import Situation
from agentrig.hardware.cpu import Cpu
from agentrig.plan import resolve

STAND_IN = Path(__file__).parent / "stand_in"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Return what installs a vLLM of a version: the stand-in, with the metadata of a distribution."""

    def install(version: str | None) -> None:
        if version is None:
            monkeypatch.setattr(checks, "installed", lambda: None)
            return
        info = tmp_path / f"vllm-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{STAND_IN}")

    return install


@pytest.mark.parametrize(
    ("version", "hardware", "says"),
    [
        (None, Cuda(), "vLLM is not installed"),
        ("0.23.1", Cuda(), "vLLM 0.23.1 is installed, and it supports vllm==0.24.*"),
        ("0.24.0", Cuda(), ""),
        ("0.24.0", Cpu(), "it needs an NVIDIA GPU, and the run's hardware is cpu"),
    ],
)
def test_it_serves_with_a_supported_vllm_on_a_gpu_only(installed, version, hardware, says):
    installed(version)
    assert checks.refusal(hardware) == says


def test_auto_takes_it_where_it_can_serve_and_says_so(installed):
    installed("0.24.0")
    assert resolve("mini", overrides=["hardware.use=cuda"]).components["server"].spec.name == "vllm"
    assert resolve("mini", overrides=["hardware.use=cpu"]).components["server"].spec.name == "embedded"


def test_without_vllm_auto_takes_another(installed):
    installed(None)
    assert resolve("mini", overrides=["hardware.use=cuda"]).components["server"].spec.name == "embedded"


@pytest.mark.parametrize(
    ("version", "broken", "result", "says"),
    [
        (None, False, "problem", "vllm cannot serve here: vLLM is not installed"),
        ("0.24.0", False, "ok", "vLLM 0.24.0 loads beside torch"),
        ("0.24.0", True, "problem", "vLLM 0.24.0 does not load: ImportError: no vllm._C here"),
    ],
)
def test_the_doctor_loads_the_server_of_the_plan(installed, tmp_path, monkeypatch, version, broken, result, says):
    installed("0.24.0")
    plan = resolve("mini", overrides=["hardware.use=cuda", "server.use=vllm"])
    installed(version) if version is None else None
    if broken:
        (tmp_path / "vllm").mkdir()
        (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('no vllm._C here')")
    (finding,) = checks.check_vllm(Situation(hardware=Cuda(), candidates=[Cuda()], plan=plan))
    assert finding.result == result
    assert says in finding.evidence
    assert ("docs/gpu.md" in finding.cure) is (result == "problem")


def test_the_doctor_says_nothing_of_a_server_that_is_not_the_plans():
    plan = resolve("mini", overrides=["hardware.use=cpu"])
    assert list(checks.check_vllm(Situation(hardware=Cpu(), plan=plan))) == []
    assert list(checks.check_vllm(Situation(hardware=Cpu(), plan=None))) == []
