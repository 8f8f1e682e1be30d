"""The hardware `cpu`: the host's processor."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from agentrig.hardware.contract import Context, Device, Hardware, Probe
from agentrig.hardware.versions import Stack
from agentrig.settings import setting


@attrs.frozen(kw_only=True)
class CpuConfig:
    """Settings of `cpu`."""

    threads: int = setting(0, help="torch threads of the algorithm; 0 for one per usable core", ge=0)


def usable_cores() -> int:
    """Return how many cores this process may use; on systems that don't pin processes (macOS), all of them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def host_memory() -> int:
    """Return the bytes of memory that this process may use: the machine's, or its control group's if less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def choose_vector_kernels() -> None:
    """Let MKL choose torch's kernels for cos, sin, exp and the like; call it before torch computes in several threads.

    With the first call of any of them in a process, MKL looks up the processor. For a moment it has a number from
    another list in its place. On Intel processors with AVX-512, a second thread that reads it then computes its part
    of that one call with kernels that are right to about 12 bits. With MKL 2024.2, which torch's wheels contain, a few
    of a hundred processes on busy machines begin so: in the learner's first pass the positions of some tokens are
    wrong, and in a server their table may stay wrong.

    Source: the code of MKL 2024.2's `mkl_vml_serv_cpu_detect`; https://github.com/pytorch/pytorch/issues/188792
    """
    import torch

    torch.zeros(1).cos()  # one number: one thread


@attrs.frozen(kw_only=True)
class Cpu(Hardware):
    """The host's processor: gloo, sdpa, fp32."""

    config: CpuConfig = attrs.field(factory=CpuConfig)
    name: str = "cpu"
    torch_device: str = "cpu"
    torch_cure: str = "install torch"

    @property
    def threads(self) -> int:
        """How many threads torch should use."""
        return self.config.threads or usable_cores()

    def probe(self) -> Probe:
        """Find the processor; it is always there."""
        cores = usable_cores()
        device = Device(name=platform.machine(), memory=host_memory())
        return Probe(available=True, devices=(device,), evidence=(f"{cores} usable cores",))

    def environment(self, context: Context | None = None) -> Mapping[str, str]:
        """Stop OpenMP's idle threads from spinning: under load, spinning makes a step three times slower."""
        return {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(self.threads)}

    def stacks(self) -> Sequence[Stack]:
        """Return what the project's own tests and recipes run on."""
        return (
            Stack(
                name="torch 2.13 on CPU",
                proof="hardware-tested",
                versions={"python": ">=3.11,<3.13", "torch": "==2.13.*", "transformers": ">=5.10,<6"},
                algorithms=("grpo", "sft"),
                source="the project's own tests",
            ),
        )
