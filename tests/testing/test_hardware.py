"""The checks of hardware: each catches its own fault and no other; agentrig's own hardware passes."""

from __future__ import annotations

from pathlib import Path

import pytest
from quick import quick_first

from agentrig import HardwareSpec
from agentrig.hardware import Cpu
from agentrig.testing import Check, check_hardware, checks
from agentrig.testing.hardware import TABLE

BROKEN = Path(__file__).parent / "broken" / "hardware.py"
CHECKS = [declared.name.partition(".")[2] for declared in TABLE]


@pytest.mark.parametrize("fault", quick_first(CHECKS, ("probe",)))
def test_each_fault_is_caught_by_its_own_check_alone(fault: str) -> None:
    report = check_hardware(f"{BROKEN}:breaks-{fault}", raise_failed=False)
    assert [r.check for r in report.failed] == [f"hardware.{fault}"], report
    assert "what to do: " in report.failed[0].message


@pytest.mark.parametrize("check", checks("hardware", "cpu", settings={"threads": 1}), ids=str)
def test_the_cpu(check: Check) -> None:
    check()


def test_a_spec_and_a_built_one_are_checked_without_a_fresh_interpreter() -> None:
    spec = HardwareSpec(name="cpu", summary="x", build=lambda config: Cpu())
    for given in (spec, Cpu()):
        report = check_hardware(given)
        skipped = {r.check for r in report.results if r.status == "skipped"}
        assert {"hardware.probe-light", "hardware.computes"} <= skipped
        assert report.ok
