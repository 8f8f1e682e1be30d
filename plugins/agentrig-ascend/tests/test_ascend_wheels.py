"""The real torch_npu and vllm-ascend, installed where they must not be: the doctor must find them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


def doctor(*arguments: str, paths: list[Path], **environ: str) -> dict[str, dict[str, str]]:
    """Run the doctor in a process that finds more distributions; return its findings by check."""
    python_path = os.pathsep.join(str(p) for p in paths)
    done = subprocess.run(
        [sys.executable, "-m", "agentrig", "doctor", *arguments, "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": python_path, **environ},
        check=False,
    )
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["could_start"] is False
    return {f["check"]: f for f in report["findings"]}


def test_torch_npu_without_cann_breaks_torch_and_only_the_doctors_subprocess(wheel: Any) -> None:
    import torch

    number = torch.__version__.partition("+")[0]
    folder = wheel(f"torch_npu=={number}")
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    broken = subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, env=environ, check=False)
    assert broken.returncode != 0, "this torch_npu loads here: there is nothing to find"
    found = doctor("--hardware", "cpu", paths=[folder])
    for check in ("torch", "torch_npu"):
        assert found[check]["result"] == "problem"
        assert "torch_npu is installed, and CANN is not installed or not sourced" in found[check]["evidence"]
        assert "set_env.sh" in found[check]["cure"]
        assert "pip uninstall torch_npu" in found[check]["cure"]


def test_vllm_ascend_beside_cuda_is_found(wheel: Any, tmp_path: Any) -> None:
    folder = wheel("vllm-ascend==0.10.0rc1")
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-a, NVIDIA H200, 143771, 580.82.07'\n")
    tool.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    found = doctor("--hardware", "cuda", paths=[folder], PATH=path)
    assert found["vllm platform"]["result"] == "problem"
    assert "vLLM would choose the Ascend platform" in found["vllm platform"]["evidence"]
