"""The hardware `ascend`: implements agentrig's hardware contract."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal

import attrs

from agentrig import setting
from agentrig.hardware import Context, Hardware, Override, Probe, Stack, Symptom
from agentrig.hardware.versions import fits
from agentrig_ascend import patches
from agentrig_ascend.overrides import REFERENCE, SINCE
from agentrig_ascend.probe import SET_ENV, cann_home, cann_version, driver_version, probe
from agentrig_ascend.stacks import STACKS

SYMPTOMS = (
    Symptom(
        pattern=r"torch_npu.*has no attribute '_autoload'|_autoload.*torch_npu",
        cause="torch_npu is broken, or another module of that name hides it",
        cure="pip install --force-reinstall torch_npu; python -c 'import torch_npu; print(torch_npu.__file__)' "
        "shows which one is found",
    ),
    Symptom(
        pattern=r"libhccl\.so|libascendcl\.so|libascend_hal\.so|Failed to load the backend extension: torch_npu",
        cause="torch_npu is installed, and CANN is not installed or not sourced",
        cure=f"{SET_ENV}; on a host without an NPU: pip uninstall torch_npu. "
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0 lets torch start without it, to look closer",
    ),
    Symptom(
        pattern=r"dcmi.*-80(05|20)|-80(05|20).*dcmi",
        cause="the driver cannot be reached, or another container holds the device",
        cure="give each container its own /dev/davinciN and mount /usr/local/dcmi and /usr/local/Ascend/driver",
    ),
    Symptom(
        pattern=r"Total available GPUs 0 is less than total desired GPUs|No available node types can fulfill.*GPU",
        cause="verl asked Ray for GPUs on an NPU host",
        cure="trainer.device=npu, which --hardware ascend sets",
    ),
)


@attrs.frozen(kw_only=True)
class AscendConfig:
    """Settings of `ascend`."""

    socket_ports: str = setting(
        "auto",
        help="HCCL's port ranges: auto, or such as 60000-60050; several processes on one NPU need more than one port",
    )
    ray_keeps_visibility: bool = setting(
        False,
        help="stop Ray from setting ASCEND_RT_VISIBLE_DEVICES for its workers: "
        "needed where a newer Ray leaves torch.npu without a device",
    )
    memory_gib: float = setting(
        0.0,
        help="GiB of a device that a run may take, its server and all that it starts included; 0 for all of it",
        ge=0,
    )


@attrs.frozen(kw_only=True)
class Ascend(Hardware):
    """Huawei Ascend NPUs."""

    config: AscendConfig = attrs.field(factory=AscendConfig)
    name: str = "ascend"
    torch_device: str = "npu"
    visible_devices: str | None = "ASCEND_RT_VISIBLE_DEVICES"
    visible_order: Literal["any", "ascending"] = "ascending"
    ray_resource: str = "NPU"
    ray_noset: str | None = "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"
    verl_platform: str | None = "huawei"
    dtypes: Sequence[str] = ("bfloat16", "float32")
    attention: Sequence[str] = ("flash_attention_2", "sdpa", "eager")
    # There is no flash_attn package for NPUs: transformers and verl use torch_npu's kernels instead.
    flash_attention: str = "torch_npu"
    algorithms: Sequence[str] = ("verl",)
    torch_cure: str = f"install the torch_npu that matches torch to the patch level, and {SET_ENV}"
    symptoms: Sequence[Symptom] = attrs.field(default=SYMPTOMS, repr=False)

    def probe(self) -> Probe:
        """Look for device files, ask `npu-smi`, look for a sourced CANN."""
        return probe(os.environ)

    def environment(self, context: Context | None = None) -> Mapping[str, str]:
        """Return HCCL's ports for the driver and workers; the rollout's switches by vLLM's and verl's version."""
        context = context or Context()
        variables: dict[str, str] = {}
        verl, vllm = context.versions.get("verl"), context.versions.get("vllm")
        # verl sets the port ranges to auto since 0.7.1; a range set by the user has precedence.
        if verl is None or fits(verl, "<0.7.1") or self.config.socket_ports != "auto":
            variables["HCCL_HOST_SOCKET_PORT_RANGE"] = self.config.socket_ports
            variables["HCCL_NPU_SOCKET_PORT_RANGE"] = self.config.socket_ports
        if self.config.ray_keeps_visibility and self.ray_noset:
            variables[self.ray_noset] = "1"
        if context.role == "rollout":
            if fits(verl, ">=0.9"):
                variables["NCCL_CUMEM_ENABLE"] = "0"
                variables["VLLM_ASCEND_AUTO_DETECT_QUANTIZATION"] = "0"
            if fits(vllm, "<0.13"):
                variables["VLLM_ASCEND_ENABLE_NZ"] = "0"
                variables["VLLM_ALL2ALL_BACKEND"] = "flashinfer_all2allv"
        if context.role != "driver" and fits(verl, ">=0.9") and self.verl_platform:
            variables["VERL_PLATFORM"] = self.verl_platform
        return variables

    def all_overrides(self) -> Sequence[Override]:
        """Return the reference's NPU profile as changes, and what newer versions of verl need on top."""
        return (*REFERENCE, *SINCE)

    def worker_setup(self, versions: Mapping[str, str]) -> str | None:
        """Return the loader of vllm-ascend's patches, for the few versions that need it."""
        needed = fits(versions.get("vllm-ascend"), patches.NEEDED)
        return f"{patches.__name__}:{patches.apply.__name__}" if needed else None

    def host_versions(self) -> Mapping[str, str]:
        """Return CANN's and the driver's version, where they can be read."""
        home = cann_home(os.environ)
        found = {"cann": cann_version(home) if home else None, "driver": driver_version()}
        return {name: version for name, version in found.items() if version}

    def stacks(self) -> Sequence[Stack]:
        """Return the sets that the makers publish; none was run here, and those that agentrig can't use are history."""
        return STACKS
