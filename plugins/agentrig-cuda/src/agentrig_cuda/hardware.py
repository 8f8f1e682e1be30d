"""The hardware `cuda`: implements agentrig's hardware contract."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import attrs

from agentrig import setting
from agentrig.hardware import Hardware, Probe, Stack, Symptom, installed
from agentrig_cuda.probe import ask_smi, probe

ATTENTION = ("auto", "flash_attention_2", "sdpa", "eager")

SYMPTOMS = (
    Symptom(
        pattern=r"flash_attn.*undefined symbol|undefined symbol.*flash_attn",
        cause="flash-attn was built against another torch",
        cure="reinstall flash-attn for this torch (pip install --no-build-isolation --force-reinstall flash-attn), "
        "or uninstall it: sdpa is used then",
    ),
    Symptom(
        pattern=r"libcuda\.so\.1: cannot open shared object file",
        cause="the driver's library is not in this container",
        cure="start the container with the NVIDIA runtime (--gpus all)",
    ),
    Symptom(
        pattern=r"driver version is insufficient|driver on your system is too old",
        cause="torch was built for a newer CUDA than the driver has",
        cure="update the driver, or install a torch built for an older CUDA",
    ),
    Symptom(
        pattern=r"vllm/_C.*undefined symbol|undefined symbol.*vllm/_C",
        cause="vLLM was built against another torch",
        cure="install the torch that this vLLM pins: pip show vllm names it under Requires",
    ),
)


@attrs.frozen(kw_only=True)
class CudaConfig:
    """Settings of `cuda`."""

    attention: str = setting(
        "auto", help="auto: flash_attention_2 where flash-attn is installed, else sdpa", choices=ATTENTION
    )
    memory_gib: float = setting(
        0.0,
        help="GiB of a device that a run may take, its server and all that it starts included; 0 for all of it",
        ge=0,
    )


@attrs.frozen(kw_only=True)
class Cuda(Hardware):
    """NVIDIA GPUs."""

    config: CudaConfig = attrs.field(factory=CudaConfig)
    name: str = "cuda"
    torch_device: str = "cuda"
    visible_devices: str | None = "CUDA_VISIBLE_DEVICES"
    ray_resource: str = "GPU"
    ray_noset: str | None = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
    verl_platform: str | None = "nvidia"
    dtypes: Sequence[str] = ("bfloat16", "float32")
    attention: Sequence[str] = attrs.field()
    torch_cure: str = (
        "install a torch built for CUDA (its wheels without a +cpu suffix) and, for verl, the one that vLLM pins"
    )
    symptoms: Sequence[Symptom] = attrs.field(default=SYMPTOMS, repr=False)

    @attention.default
    def _attention(self) -> Sequence[str]:
        if self.config.attention != "auto":
            return (self.config.attention,)
        # By metadata only: the doctor checks whether it loads.
        found = installed(["flash-attn"]).get("flash-attn", "").startswith("2.")
        return (*(("flash_attention_2",) if found else ()), "sdpa", "eager")

    def probe(self) -> Probe:
        """Look for device files, then ask `nvidia-smi`, then NVML."""
        return probe(os.environ)

    def host_versions(self) -> Mapping[str, str]:
        """Return the driver's version."""
        _, gpus = ask_smi(os.environ)
        return {"driver": gpus[0].driver} if gpus else {}

    def stacks(self) -> Sequence[Stack]:
        """Return the sets of versions that ran on an NVIDIA GPU."""
        return (
            Stack(
                name="verl 0.9.1 on CUDA",
                proof="hardware-tested",
                versions={
                    "python": "==3.12.*",
                    "torch": "==2.11.*",
                    "vllm": "==0.24.*",
                    "verl": "==0.9.1",
                    "ray": "==2.60.*",
                    "transformers": ">=5.5.3,<5.11",
                    "tensordict": "==0.10.*",
                    "TransferQueue": "==0.1.11",
                },
                algorithms=("verl",),
                source="GRPO steps of a 1.5B model on one H200",
                clashes=(
                    "agentops 0.4 wants packaging<25 and TransferQueue, by pyvers, packaging>=25: "
                    "keep packaging 25, which agentops runs with",
                ),
            ),
            Stack(
                name="torch 2.11 on CUDA",
                proof="contract-tested",
                versions={"python": "==3.12.*", "torch": "==2.11.*", "transformers": ">=5.10,<6"},
                algorithms=("grpo", "sft"),
                source="forward and backward passes of these two on one H200, no whole run",
            ),
        )
