"""The real torch_npu and vllm-ascend, installed where they must not be: the doctor must find them."""

import os
import subprocess
import sys
from typing import Any

import pytest
from hosts import ONE_GPU, doctor, tool

pytestmark = pytest.mark.slow


def test_torch_npu_without_cann_breaks_torch_and_only_the_doctors_subprocess(wheel: Any) -> None:
    import torch

    number = torch.__version__.partition("+")[0]
    folder = wheel(f"torch_npu=={number}")
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    broken = subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, env=environ, check=False)
    assert broken.returncode != 0, "this torch_npu loads here: there is nothing to find"
    status, found = doctor("--hardware", "cpu", PYTHONPATH=str(folder))
    assert status == 1
    for check in ("torch", "torch_npu"):
        assert found[check]["result"] == "problem"
        assert "torch_npu is installed, and CANN is not installed or not sourced" in found[check]["evidence"]
        assert "set_env.sh" in found[check]["cure"]
        assert "pip uninstall torch_npu" in found[check]["cure"]


def test_vllm_ascend_beside_cuda_is_found(wheel: Any, tmp_path: Any) -> None:
    folder = wheel("vllm-ascend==0.10.0rc1")
    path = tool(tmp_path, "nvidia-smi", ONE_GPU)
    status, found = doctor("--hardware", "cuda", PYTHONPATH=str(folder), PATH=path)
    assert status == 1
    assert found["vllm platform"]["result"] == "problem"
    assert "vLLM would choose the Ascend platform" in found["vllm platform"]["evidence"]
