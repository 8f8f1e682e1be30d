"""The hardware `cuda`: NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Iterable

from agentrig import HardwareSpec, hookimpl
from agentrig_cuda.hardware import Cuda, CudaConfig

__all__ = ["Cuda", "CudaConfig", "register_hardware"]


@hookimpl
def register_hardware() -> Iterable[HardwareSpec]:
    """Register `cuda`."""
    from agentrig_cuda.checks import check_flash_attention, check_unwanted_ascend

    yield HardwareSpec(
        name="cuda",
        summary="NVIDIA GPUs: nccl, bf16, flash attention where it is installed.",
        config=CudaConfig,
        build=lambda config: Cuda(config=config),
        checks=(check_flash_attention, check_unwanted_ascend),
    )
