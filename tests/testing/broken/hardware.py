"""Hardware with one fault each: the one called X is caught by the check `hardware.X` and by no other."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from agentrig import HardwareSpec, hookimpl
from agentrig.findings import Finding
from agentrig.hardware import Context, Device, Hardware, Probe, Stack

ABSENT = Probe(available=False, evidence=("/dev/board0 is not there",))
HERE = Probe(available=True, devices=(Device(name="board"),), evidence=("/dev/board0 is there",))
COUNT = itertools.count()


@attrs.frozen(kw_only=True)
class Board(Hardware):
    """Hardware whose methods do what the fault says."""

    name: str
    torch_device: str = "cpu"
    on_probe: Callable[[], Probe] = lambda: ABSENT
    on_environment: Callable[[], Any] = lambda: {"BOARD": "1"}
    known: Sequence[Stack] = ()

    def probe(self) -> Probe:
        return self.on_probe()

    def environment(self, context: Context | None = None) -> Mapping[str, str]:
        found: Mapping[str, str] = self.on_environment()
        return found

    def stacks(self) -> Sequence[Stack]:
        return self.known


def after_import(name: str, value: Any) -> Any:
    importlib.import_module(name)
    return value


def uncured(situation: Any) -> list[Finding]:
    return [Finding(check="board", result="problem", evidence="the driver is old")]


def heavy_build(config: Any) -> Board:
    importlib.import_module("ray")
    return Board(name="imports-light")


def numbered() -> Probe:
    """Find another number of lines each time."""
    return attrs.evolve(ABSENT, evidence=tuple("x" for _ in range(next(COUNT) + 1)))


FAULTS: Mapping[str, Mapping[str, Any]] = {
    "declares": {"dtypes": ("fp32",)},
    "environment": {"on_environment": lambda: {"BOARD_THREADS": 4}},
    "imports-light-environment": {"on_environment": lambda: after_import("torch", {})},  # ray changes os.environ
    "probe": {"on_probe": numbered},
    "imports-light-probe": {"on_probe": lambda: after_import("ray", ABSENT)},
    "hidden": {"on_probe": lambda: HERE, "visible_devices": "BOARD_VISIBLE"},
    "explains": {"on_probe": lambda: attrs.evolve(ABSENT, problems=("the driver does not answer",))},
    "probe-memory": {"on_probe": lambda: attrs.evolve(ABSENT, devices=(Device(name="board", memory=81_920),))},
    "stacks": {"known": (Stack(name="old", proof="contract-tested", versions={"python": "three"}),)},
    "computes": {"on_probe": lambda: HERE, "torch_device": "xpu"},
}
"""Check to the fields that break it."""


@hookimpl
def register_hardware() -> Iterable[HardwareSpec]:
    for check, fields in FAULTS.items():
        yield HardwareSpec(name=check, summary="Broken.", build=lambda config, board=Board(name=check, **fields): board)
    yield HardwareSpec(name="loads", summary="Broken.", build=lambda config: 1 / 0)
    yield HardwareSpec(name="imports-light", summary="Broken.", build=heavy_build)
    yield HardwareSpec(name="doctor", summary="Broken.", build=lambda config: Board(name="doctor"), checks=(uncured,))
