"""The hardware `fake-accelerator`: an accelerator that is really the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs

from agentrig import HardwareSpec, hookimpl, setting
from agentrig.findings import Finding, Situation
from agentrig.hardware import Context, Device, Hardware, Probe, Stack


@attrs.frozen(kw_only=True)
class Config:
    """The settings: `[hardware]` of a run file."""

    threads: int = setting(1, help="torch threads", ge=1)


@attrs.frozen(kw_only=True)
class Accelerator(Hardware):
    """An accelerator that is really the CPU."""

    config: Config = attrs.field(factory=Config)
    name: str = "fake-accelerator"
    torch_device: str = "cpu"
    visible_devices: str | None = "FAKE_VISIBLE_DEVICES"
    ray_resource: str = "FAKE"

    @property
    def threads(self) -> int:
        """How many threads torch should use."""
        return self.config.threads

    def probe(self) -> Probe:
        """Count the devices; a real plugin looks at device files and its vendor's tool, and never imports torch."""
        value = os.environ.get("FAKE_ACCELERATORS")
        evidence = (f"FAKE_ACCELERATORS={value}" if value is not None else "FAKE_ACCELERATORS is not set",)
        if value is None:
            return Probe(available=False, evidence=evidence)
        if not value.isdigit():
            problem = f"FAKE_ACCELERATORS={value} is not a number: export FAKE_ACCELERATORS=1"
            return Probe(available=False, evidence=evidence, problems=(problem,))
        visible = os.environ.get("FAKE_VISIBLE_DEVICES")
        shown = range(int(value)) if visible is None else [int(i) for i in visible.split(",") if i.strip().isdigit()]
        devices = tuple(Device(name=f"fake accelerator {i}") for i in shown if i < int(value))
        return Probe(available=bool(devices), devices=devices, evidence=evidence)

    def environment(self, context: Context | None = None) -> Mapping[str, str]:
        """Return the variables to set before torch is imported."""
        return {"OMP_NUM_THREADS": str(self.threads)}

    def stacks(self) -> Sequence[Stack]:
        """Return the sets of versions that were seen to work."""
        return (
            Stack(
                name="fake-accelerator on torch 2.13",
                proof="contract-tested",
                versions={"torch": ">=2.11,<3"},
                algorithms=("grpo",),
                source="this example's test",
            ),
        )


def check_fake_driver(situation: Situation) -> Iterator[Finding]:
    """Say that the driver is fine: there is none."""
    if situation.uses("fake-accelerator"):
        yield Finding.ok("fake driver", "there is none, and none is needed")


@hookimpl
def register_hardware() -> Iterable[HardwareSpec]:
    """Register `fake-accelerator`."""
    yield HardwareSpec(
        name="fake-accelerator",
        summary="An accelerator that is really the CPU.",
        config=Config,
        build=lambda config: Accelerator(config=config),
        checks=(check_fake_driver,),
    )
