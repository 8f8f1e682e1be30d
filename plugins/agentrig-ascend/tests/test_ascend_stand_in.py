"""The control paths with a stand-in for torch_npu, in a separate process; nothing is computed on it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hosts import tool

STAND_IN = Path(__file__).parent / "stand_in"


def run(code: str, *paths: Path | str, **environ: str) -> Any:
    """Run code in a process that finds the stand-in; its last line must be JSON."""
    path = os.pathsep.join(str(p) for p in (STAND_IN, *paths))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path, **environ},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.slow
def test_torch_accelerate_and_transformers_report_what_the_plugin_says() -> None:
    code = """
import json, torch
import torch.distributed as dist
from accelerate.utils import is_npu_available
from transformers.utils import is_torch_npu_available
from agentrig_ascend import Ascend
ascend = Ascend()
dist.init_process_group("hccl", store=dist.HashStore(), rank=0, world_size=1)
total = torch.ones(2)
dist.all_reduce(total)
print(json.dumps({
    "device": str(torch.device(ascend.torch_device, 1)),
    "available": torch.get_device_module(ascend.torch_device).is_available(),
    "accelerate": is_npu_available(),
    "transformers": is_torch_npu_available(),
    "backend": dist.get_backend(),
    "sum": total.tolist(),
    "dtypes": [str(getattr(torch, d)) for d in ascend.dtypes],
}))
"""
    assert run(code) == {
        "device": "npu:1",
        "available": True,
        "accelerate": True,
        "transformers": True,
        "backend": "hccl",
        "sum": [1.0, 1.0],
        "dtypes": ["torch.bfloat16", "torch.float32"],
    }


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.5.0", "0.8.0"])
def test_verls_own_device_module_agrees_with_the_plugin(wheel: Any, version: Any) -> None:
    code = """
import importlib.util, json, os, sys, types
from agentrig_ascend import Ascend
root = os.environ["VERL"]
package = types.ModuleType("verl")  # verl's own __init__ would import ray and tensordict
package.__path__ = [root]
sys.modules["verl"] = package
import verl.utils
from verl.utils import device
ascend = Ascend()
print(json.dumps([
    device.get_device_name() == ascend.torch_device,
    device.get_nccl_backend() == "hccl",
    getattr(device, "get_visible_devices_keyword", lambda: ascend.visible_devices)() == ascend.visible_devices,
    getattr(device, "get_resource_name", lambda: ascend.ray_resource)() == ascend.ray_resource,
]))
"""
    assert run(code, VERL=str(wheel(f"verl=={version}") / "verl")) == [True] * 4


@pytest.mark.slow
def test_verls_platform_agrees_with_the_plugin(wheel: Any) -> None:
    code = """
import json, os, sys, types
from agentrig_ascend import Ascend
from agentrig.hardware import Context
package = types.ModuleType("verl")
package.__path__ = [os.environ["VERL"]]
sys.modules["verl"] = package
ascend = Ascend()
os.environ.update(ascend.environment(Context(role="rollout", versions={"verl": "0.9.1", "vllm": "0.23.0"})))
from verl.plugin.platform import get_platform
platform = get_platform()
print(json.dumps({
    "name": [platform.vendor_name, ascend.verl_platform],
    "device": [platform.device_name, ascend.torch_device],
    "backend": [platform.communication_backend_name(), "hccl"],
    "visible": [platform.visible_devices_envvar(), ascend.visible_devices],
    "options": [platform.ray_resource_options(2), {"resources": {ascend.ray_resource: 2}}],
    "noset": [platform.ray_noset_envvars(), [ascend.ray_noset]],
    "rollout": [platform.rollout_env_vars(), {k: os.environ.get(k) for k in platform.rollout_env_vars()}],
}))
"""
    for name, (verls, ours) in run(code, VERL=str(wheel("verl==0.9.1") / "verl")).items():
        assert verls == ours, name


@pytest.mark.slow
def test_the_doctor_finds_no_problem_on_a_complete_host(tmp_path: Any) -> None:
    """Device files, npu-smi and CANN are stand-ins too; the checks and their processes are the real ones."""
    dev, bins, cann = tmp_path / "dev", tmp_path / "bin", tmp_path / "cann"
    for folder in (dev, bins, cann / "lib64", cann / "compiler"):
        folder.mkdir(parents=True)
    for name in ("davinci0", "davinci1", "davinci_manager", "devmm_svm", "hisi_hdc"):
        (dev / name).touch()
    (cann / "compiler" / "version.info").write_text("Version=9.1.0\n")
    (cann / "lib64" / "libhccl.so").touch()
    rows = "".join(
        f"| {i} 910B3 | OK | 90 40 0 / 0 |\n| 0 | 0000:C{i}:00.0 | 0 0 / 0 3162 / 65536 |\n" for i in range(2)
    )
    path = tool(bins, "npu-smi", rows)
    code = f"""
import json, os
from pathlib import Path
from agentrig.doctor import Situation
from agentrig.doctor.devices import check_hardware, check_torch, check_visible
from agentrig.hardware import installed
from agentrig_ascend import Ascend
from agentrig_ascend.checks import check_cann, check_hccl_ports, check_torch_npu
from agentrig_ascend.probe import probe
ascend = Ascend()
found = probe(os.environ, Path({str(dev)!r}), Path({str(tmp_path)!r}))
situation = Situation(hardware=ascend, candidates=[ascend], probes={{"ascend": found}},
                      versions=installed(["torch", "torch_npu"]))
checks = (check_hardware, check_visible, check_torch, check_torch_npu, check_cann, check_hccl_ports)
print(json.dumps([[f.check, f.result, f.evidence] for check in checks for f in check(situation)]))
"""
    found = run(code, PATH=path, ASCEND_HOME_PATH=str(cann), ASCEND_RT_VISIBLE_DEVICES="0,1")
    results = {check: (result, evidence) for check, result, evidence in found}
    assert results["ascend devices"][0] == "ok"
    assert "910B3 69 GB" in results["ascend devices"][1]
    assert results["visible devices"][0] == "ok"
    assert "can use npu, 2 device(s)" in results["torch"][1]
    assert results["torch_npu"] == ("ok", "torch_npu 2.13.0 loads; 2 device(s)")
    assert results["CANN"] == ("ok", f"9.1.0 at {cann}")
    # The two that this host lacks are found.
    assert results["CANN nnal"][0] == "warning"
    assert results["NPU driver"][0] == "problem"


@pytest.mark.slow
def test_a_torch_npu_of_another_torch_is_found(tmp_path: Any) -> None:
    code = """
import json
from agentrig.doctor import Situation
from agentrig_ascend import Ascend
from agentrig_ascend.checks import check_torch_npu
situation = Situation(hardware=Ascend(), versions={"torch": "2.11.0+cpu", "torch_npu": "2.10.0.post4"})
print(json.dumps([[f.result, f.evidence, f.cure] for f in check_torch_npu(situation)]))
"""
    first, second = run(code)
    assert first[0] == "problem"
    assert "beside torch 2.11.0+cpu" in first[1]
    assert first[2] == "install torch 2.10.0, or another torch_npu"
    assert second[0] == "ok"


@pytest.mark.slow
def test_the_memory_plan_measures_and_holds_an_npu() -> None:
    """All of it that is not particular to a device: `grpo` itself is not for this hardware."""
    code = """
import json, attrs, torch
from agentrig.device_memory import give_memory_back
from agentrig.hardware.memory import GIB, ServerNeed
from agentrig_grpo import planning
from agentrig_grpo.config import GrpoConfig
from agentrig_grpo.fitting import Choice, Fitting, Need
now = planning.measured("npu:0", 32 * GIB)
need = Need(weights=GIB, gradients=GIB, optimizer=2 * GIB, activations=GIB, change=GIB)
fitting = Fitting(
    config=GrpoConfig(), device=now, server=ServerNeed(weights=8 * GIB, asleep=GIB), estimate=lambda *of: need,
    passes=(256, 49152), layers=4, group=100,
)
plan = planning.MemoryPlan(fitting=fitting, choice=Choice(tokens=256, sleeps=True), chunk=1)
plan.hold(True)
plan.hold(False)
give_memory_back("npu:0")
print(json.dumps({"now": attrs.asdict(now), "told": torch.npu.told, "line": plan.line()}))
"""
    found, gib = run(code), 1 << 30
    assert found["now"] == {
        **{"name": "npu:0", "total": 64 * gib, "others": 20 * gib, "reserved": 4 * gib, "limit": 32 * gib}
    }
    budget = 32 - 0.75
    assert found["told"] == [(budget - 1) / 64, (budget - 8) / 64, "empty_cache"]
    assert "31.2 GiB of npu:0 of memory_gib = 32: server 8.0" in found["line"]
