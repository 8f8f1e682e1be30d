"""The hardware `ascend`: Huawei Ascend NPUs (contract-tested: no NPU has run it yet)."""

from __future__ import annotations

from collections.abc import Iterable

from agentrig import HardwareSpec, hookimpl
from agentrig_ascend.hardware import Ascend, AscendConfig

__all__ = ["Ascend", "AscendConfig", "register_hardware"]


@hookimpl
def register_hardware() -> Iterable[HardwareSpec]:
    """Register `ascend`."""
    from agentrig_ascend.checks import check_cann, check_hccl_ports, check_torch_npu

    yield HardwareSpec(
        name="ascend",
        summary="Huawei Ascend NPUs: hccl, bf16, torch_npu (contract-tested).",
        config=AscendConfig,
        build=lambda config: Ascend(config=config),
        checks=(check_torch_npu, check_cann, check_hccl_ports),
    )
