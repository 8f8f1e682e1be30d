"""Hardware: what an algorithm runs on. `cpu` lives here; others are plugins."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs

from agentrig.config import setting
from agentrig.specs import HardwareSpec


@attrs.frozen(kw_only=True)
class Device:
    """One device: its name and its memory in bytes (None when unknown)."""

    name: str
    memory: int | None = None


@attrs.frozen(kw_only=True)
class Probe:
    """What a probe found, and how.

    Attributes:
        available: Whether a run could use it now.
        devices: In the order of their ids.
        evidence: What was looked at and what was seen, a line each.
        problems: What is there but broken, a line each, with its cure. A probe that is not
            available but has problems is a *broken* accelerator: `--hardware auto` stops on it.
    """

    available: bool
    devices: Sequence[Device] = ()
    evidence: Sequence[str] = ()
    problems: Sequence[str] = ()


class Hardware(Protocol):
    """What `HardwareSpec.build` returns."""

    name: str
    torch_device: str
    collective_backend: str
    dtypes: Sequence[str]

    def probe(self) -> Probe:
        """Look for devices by files, tools and metadata; cheap, never imports torch."""
        ...

    def environment(self) -> Mapping[str, str]:
        """Return the environment variables to set, where unset, before torch is imported."""
        ...


@attrs.frozen(kw_only=True)
class CpuConfig:
    """Settings of `cpu`."""

    threads: int = setting(0, help="torch threads of the algorithm; 0 for one per usable core", ge=0)


@attrs.frozen(kw_only=True)
class Cpu:
    """The host's processor: gloo, sdpa, fp32."""

    config: CpuConfig = attrs.field(factory=CpuConfig)
    name: str = "cpu"
    torch_device: str = "cpu"
    collective_backend: str = "gloo"
    dtypes: Sequence[str] = ("float32",)

    @property
    def threads(self) -> int:
        """How many threads torch should use."""
        return self.config.threads or len(os.sched_getaffinity(0))

    def probe(self) -> Probe:
        """Find the processor; it is always there."""
        cores = len(os.sched_getaffinity(0))
        return Probe(available=True, devices=(Device(name="cpu"),), evidence=(f"{cores} usable cores",))

    def environment(self) -> Mapping[str, str]:
        """Keep OpenMP's idle threads from spinning: under load that costs a factor of three."""
        return {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(self.threads)}


def cpu_spec() -> HardwareSpec:
    """Return the spec of the built-in hardware."""

    def build(config: Any) -> Cpu:
        return Cpu(config=config)

    return HardwareSpec(name="cpu", summary="The host's processor: gloo, sdpa, fp32.", config=CpuConfig, build=build)
