import importlib
import sys
from typing import Any

import pytest
from agentrig_ascend import Ascend, AscendConfig
from agentrig_verl.workers import SETUP_VARIABLE, ray_environment, set_up_worker

from agentrig.hardware import Context
from agentrig.hardware.versions import nearest_stack


def test_the_fields_are_separate() -> None:
    ascend = Ascend()
    assert (ascend.name, ascend.torch_device, ascend.verl_platform) == ("ascend", "npu", "huawei")
    assert ascend.ray_resource == "NPU"
    assert (ascend.visible_devices, ascend.visible_order) == ("ASCEND_RT_VISIBLE_DEVICES", "ascending")
    assert not ascend.carries("grpo")


@pytest.mark.parametrize(
    ("verl", "expected"),
    [("0.5.0", "auto"), ("0.6.1", "auto"), ("0.7.1", None), ("0.9.1", None)],
)
def test_port_ranges_are_left_to_verl_where_it_sets_them(verl: Any, expected: Any) -> None:
    variables = Ascend().environment(Context(role="worker", versions={"verl": verl}))
    assert variables.get("HCCL_HOST_SOCKET_PORT_RANGE") == expected
    assert variables.get("HCCL_NPU_SOCKET_PORT_RANGE") == expected


def test_a_port_range_of_the_user_always_wins() -> None:
    ascend = Ascend(config=AscendConfig(socket_ports="60000-60050"))
    for verl in ("0.5.0", "0.9.1"):
        variables = ascend.environment(Context(role="worker", versions={"verl": verl}))
        assert variables["HCCL_NPU_SOCKET_PORT_RANGE"] == "60000-60050"


def test_the_rollouts_switches_follow_the_versions() -> None:
    old = Ascend().environment(Context(role="rollout", versions={"verl": "0.5.0", "vllm": "0.10.0"}))
    new = Ascend().environment(Context(role="rollout", versions={"verl": "0.9.1", "vllm": "0.23.0"}))
    assert old["VLLM_ASCEND_ENABLE_NZ"] == "0"
    assert old["VLLM_ALL2ALL_BACKEND"] == "flashinfer_all2allv"
    assert "NCCL_CUMEM_ENABLE" not in old
    assert new["NCCL_CUMEM_ENABLE"] == "0"
    assert new["VLLM_ASCEND_AUTO_DETECT_QUANTIZATION"] == "0"
    assert "VLLM_ASCEND_ENABLE_NZ" not in new
    assert new["VERL_PLATFORM"] == "huawei"


@pytest.mark.parametrize(
    ("version", "needed"),
    [("0.9.1", True), ("0.9.2rc1", True), ("0.10.0rc1", False), ("0.23.0", False), (None, False)],
)
def test_patches_are_set_up_only_for_the_versions_that_need_them(version: Any, needed: Any) -> None:
    versions = {"vllm-ascend": version} if version else {}
    assert Ascend().worker_setup(versions) == ("agentrig_ascend.patches:apply" if needed else None)


def test_the_patches_are_imported_in_the_worker(tmp_path: Any, monkeypatch: Any) -> None:
    """A stand-in package replaces vllm-ascend and records which patches were imported, in order."""
    patch = tmp_path / "vllm_ascend" / "patch"
    patch.mkdir(parents=True)
    (tmp_path / "vllm_ascend" / "__init__.py").write_text("seen = []\n")
    (patch / "__init__.py").touch()
    for name in ("platform", "worker"):
        (patch / f"{name}.py").write_text(f"import vllm_ascend\nvllm_ascend.seen.append({name!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    runtime = ray_environment(Ascend(), {"vllm-ascend": "0.9.2rc1"})
    monkeypatch.setenv(SETUP_VARIABLE, runtime["env_vars"][SETUP_VARIABLE])
    try:
        set_up_worker()
        assert importlib.import_module("vllm_ascend").seen == ["platform", "worker"]
    finally:
        for name in [n for n in sys.modules if n.partition(".")[0] == "vllm_ascend"]:
            del sys.modules[name]


def test_no_stack_claims_hardware() -> None:
    stacks = Ascend().stacks()
    assert len(stacks) == 3
    assert [s.proof for s in stacks] == ["history", "history", "contract-tested"]
    for stack in stacks:
        assert stack.clashes
        assert stack.versions["vllm-ascend"].startswith("==")


def test_the_nearest_stack_is_found_by_cann_too() -> None:
    assert (
        getattr(nearest_stack(Ascend().stacks(), {"cann": "8.2.RC1", "python": "3.11.9"}), "name", None)
        == "verl 0.5 on CANN 8.2"
    )
    assert getattr(nearest_stack(Ascend().stacks(), {"cann": "9.1.0"}), "name", None) == "verl 0.9 on CANN 9.1"


def test_every_symptom_compiles_and_has_a_cure() -> None:
    for symptom in Ascend().symptoms:
        assert symptom.cause
        assert symptom.cure
